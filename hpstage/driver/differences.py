"""Descriptions of differences between two trainings of a state: which leaf differs, and how each was reached. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpstage.checkpoints.state_tree import differing
from hpstage.plan.facts import Fact, ForkVerified, StateDiffers, StateReached

_SOURCES = {
    "fresh": "from the beginning of training",
    "continued": "continuing where the worker was",
    "live": "from a state in the worker's memory",
    "disk": "from a checkpoint",
    None: "straight on",
}


def difference(facts: Iterable[Fact], again: StateReached, names: Sequence[str]) -> StateDiffers:
    """Return the fact that a retrained state differs from the first one kept.

    Args:
        facts: the journal.
        again: how the state was reached now.
        names: the names of its leaves, if known.
    """
    first = next(
        fact
        for fact in facts
        if isinstance(fact, StateReached) and (fact.node, fact.step) == (again.node, again.step) and fact.kept
    )
    assert first.kept is not None
    assert again.kept is not None
    where = differing(first.kept.marks, again.kept.marks, names)
    return StateDiffers(again.node, again.step, again.worker, again.at, where, (_way(first), _way(again)))


def explain(fact: StateDiffers | ForkVerified) -> str:
    if isinstance(fact, ForkVerified):
        return fact.difference or "the fork is exact"
    what = f"the first thing that differs is {fact.where}" if fact.where else "what differs cannot be told"
    first, again = fact.ways
    return (
        f"the state after step {fact.step} was trained again, and differs: {what}. First trained {first}; now "
        f"{again}. Something in training is a function neither of the state nor of the step (the time, a thread, an "
        f"order of addresses, a file): run `hpstage check` on the trainable to find it"
    )


def _way(fact: StateReached) -> str:
    return f"from step {fact.start} on worker {fact.worker}, {_SOURCES[fact.source]}"
