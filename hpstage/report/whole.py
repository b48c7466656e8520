"""The time a search was at work, over all of its calls. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable

from hpstage.plan.facts import ChainId, ChainLost, ChainStarted, DriverId, Fact, StateReached
from hpstage.report.pauses import Pauses


def seconds_at_work(facts: Iterable[Fact], drivers: Container[DriverId]) -> float:
    """Return the seconds from the start of the first stage to the last report, on the workers' clock, without the
    pauses between calls.

    Args:
        drivers: those of the search. What others on the plan train does not count.
    """
    chains: dict[ChainId, DriverId] = {}
    calls: dict[DriverId, tuple[float, float]] = {}
    for fact in facts:
        match fact:
            case ChainStarted():
                if fact.driver in drivers:
                    chains[fact.chain] = fact.driver
                continue
            case StateReached() | ChainLost():
                start = fact.began
            case _:
                continue
        whose = chains.get(fact.chain)
        if whose is None:
            continue
        first, last = calls.get(whose, (start, fact.at))
        calls[whose] = min(first, start), max(last, fact.at)
    if not calls:
        return 0.0
    first, last = min(first for first, _ in calls.values()), max(last for _, last in calls.values())
    return Pauses(calls.values()).elapsed(first, last)
