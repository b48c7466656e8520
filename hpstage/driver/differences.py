"""Explains how two trainings of one state differ: which leaf, and how each was reached. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpstage.checkpoints.state_tree import differing
from hpstage.plan.facts import Fact, ForkVerified, NodeId, StateDiffers, StateReached
from hpstage.plan.messages import Audit, AuditEnded

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
    first = _first_kept(facts, again.node, again.step)
    assert first.kept is not None
    assert again.kept is not None
    where = differing(first.kept.marks, again.kept.marks, names)
    return StateDiffers(again.node, again.step, again.worker, again.at, where, (_way(first), _way(again)))


def audited_difference(facts: Iterable[Fact], audit: Audit, report: AuditEnded) -> StateDiffers:
    """Return the fact that a state that an audit has retrained differs from the first one kept.

    Args:
        facts: the journal.
        report: the end of the audit.
    """
    segment = audit.segment
    step = segment.stop if report.step is None else report.step
    node = next(stage.node for stage in segment.stages if step <= stage.stop)
    begun = "from scratch" if segment.source is None else f"from the checkpoint at step {segment.start}"
    alone = "" if segment.captured else ", alone and with nothing captured"
    again = f"{begun}{alone}, in a fresh process by an audit on worker {report.worker}"
    first = _first_kept(facts, node, step)
    return StateDiffers(node, step, report.worker, report.at, report.where, (_way(first), again))


def _first_kept(facts: Iterable[Fact], node: NodeId, step: int) -> StateReached:
    """Return the report of the state that was kept first at a step of a node."""
    return next(
        fact
        for fact in facts
        if isinstance(fact, StateReached) and (fact.node, fact.step) == (node, step) and fact.kept
    )


def explain(fact: StateDiffers | ForkVerified) -> str:
    if isinstance(fact, ForkVerified):
        return fact.difference or "the fork is exact"
    what = f"the first difference is in {fact.where}" if fact.where else "the difference is unknown"
    first, again = fact.ways
    return (
        f"the state after step {fact.step} was trained again, and differs: {what}. First trained {first}; now "
        f"{again}. Training depends on something that is in no state and does not follow from the step, such as the "
        f"time, a thread, the order of addresses or a file. Run `hpstage check` on the trainable to find it"
    )


def _way(fact: StateReached) -> str:
    return f"from step {fact.start} on worker {fact.worker}, {_SOURCES[fact.source]}"
