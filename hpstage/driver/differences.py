"""Descriptions of differences between two trainings of a state: which leaf differs, and how each was reached. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpstage.checkpoints.state_tree import differing
from hpstage.plan.facts import Audited, Fact, ForkVerified, NodeId, StateDiffers, StateReached
from hpstage.plan.messages import Audit

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
    first, marks = _first_kept(facts, again.node, again.step)
    assert again.kept is not None
    where = differing(marks, again.kept.marks, names)
    return StateDiffers(again.node, again.step, again.worker, again.at, where, (_way(first), _way(again)))


def audited_difference(
    facts: Iterable[Fact], fact: Audited, audit: Audit, marks: str, names: Sequence[str]
) -> StateDiffers:
    """Return the fact that a state differs that an audit has trained again.

    Args:
        facts: the journal.
        fact: the end of the audit; the last state that it compared differs.
        marks: those of the state as trained again.
        names: the names of its leaves, if known.
    """
    goal = audit.goals[max(0, fact.compared - 1)]
    first, known = _first_kept(facts, goal.node, goal.step)
    begun = "from nothing" if audit.source is None else f"from the checkpoint at step {audit.start}"
    alone = ", as a trial alone for which nothing is captured" if audit.whole else ""
    again = f"{begun} in a new process{alone}, by an audit on worker {fact.worker}"
    where = differing(known, marks, names)
    return StateDiffers(goal.node, goal.step, fact.worker, fact.at, where, (_way(first), again))


def _first_kept(facts: Iterable[Fact], node: NodeId, step: int) -> tuple[StateReached, str]:
    """Return how a state was reached when it was kept first, and the marks of its leaves."""
    return next(
        (fact, fact.kept.marks)
        for fact in facts
        if isinstance(fact, StateReached) and (fact.node, fact.step) == (node, step) and fact.kept
    )


def explain(fact: StateDiffers | ForkVerified) -> str:
    if isinstance(fact, ForkVerified):
        return fact.difference or "the fork is exact"
    what = f"the first thing that differs is {fact.where}" if fact.where else "what differs cannot be told"
    first, again = fact.ways
    return (
        f"the state after step {fact.step} was trained again, and differs: {what}. First trained {first}; now "
        f"{again}. Something that training depends on is in no state, or is a function neither of the state nor of "
        f"the step (the time, a thread, an order of addresses, a file): run `hpstage check` on the trainable to find it"
    )


def _way(fact: StateReached) -> str:
    return f"from step {fact.start} on worker {fact.worker}, {_SOURCES[fact.source]}"
