"""Checks of facts against the plan, before they are written and when they are read. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpstage.errors import InternalError, StoreError, UsageError
from hpstage.errors.text import other_format
from hpstage.plan.facts import (
    Audited,
    ChainLost,
    ChainProlonged,
    ChainStarted,
    Fact,
    ForkVerified,
    NodeId,
    PlanCreated,
    SearchStarted,
    StageFailed,
    StateDiffers,
    StateLost,
    StateReached,
    TargetAsked,
    TrainingEnded,
    TrialAdded,
)
from hpstage.plan.nodes import Node
from hpstage.plan.plan import SearchPlan
from hpstage.schedule.scalars import same

FORMAT = 3
"""Version of the journal's event format. Plans in any other format are refused."""
VERSION = "0.3.0"
"""Version of hpstage, which every driver records in the plan."""


def check(plan: SearchPlan, fact: Fact) -> None:
    """Check that a fact is consistent with the plan.

    Raises:
        UsageError: a trial is added again with schedules that change its past, or a default is given another value (the
            message names the hyperparameter).
        StoreError: the journal has another format.
        InternalError: the fact contradicts earlier facts.
    """
    refuse = _CHECKS.get(fact.__class__)
    if refuse is not None:
        refuse(plan, fact)


def _created(plan: SearchPlan, fact: PlanCreated) -> None:
    if fact.format != FORMAT:
        raise in_other_format(fact.format)
    if fact.workload != plan.workload:
        raise InternalError("a journal of another workload was folded")


def _added(plan: SearchPlan, fact: TrialAdded) -> None:
    """Check that an added trial does not change the past of a known one."""
    known, schedules = plan.trials.get(fact.trial), plan._tree.filled(fact.schedules)
    if known is None or not known.requested or (known.steps >= fact.steps and known.has(schedules, fact.steps)):
        return
    before = known.schedules
    if fact.steps < known.requested or schedules.keys() != before.keys():
        raise UsageError(
            f"trial {fact.trial} was trained to step {known.requested} with {', '.join(before)}; it "
            f"cannot become a trial of {fact.steps} steps with {', '.join(sorted(schedules))}"
        )
    for name, schedule in sorted(schedules.items()):
        if schedule.until(known.requested) != before[name].until(known.requested):
            raise UsageError(
                f"trial {fact.trial} was trained to step {known.requested} under another schedule of {name!r}; a "
                f"trial's past is fixed: keep this schedule as it was up to that step"
            )


def _started(plan: SearchPlan, fact: SearchStarted) -> None:
    known = plan.defaults
    for name, value in fact.defaults.items():
        if name in known and not same(known[name], value):
            raise UsageError(
                f"`defaults` gives {name!r} the value {value!r}, and trials of this store without {name!r} count as "
                f"trained with {known[name]!r}: keep that default and let the space return {value!r}, or state another "
                f"`version`"
            )


def _target(plan: SearchPlan, fact: TargetAsked) -> None:
    plan.known(fact.trial, fact.step)


def _reached(plan: SearchPlan, fact: StateReached) -> None:
    node = _node(plan, fact.node)
    start, step = fact.start, fact.step
    if not node.start <= start <= step or step <= node.start:
        raise InternalError(f"steps {start} to {step} do not lie on node {fact.node}")
    if fact.kept is not None and fact.kept.key != (key := plan.key(node, step)):
        raise InternalError(f"step {step} of node {fact.node} is the state {key}, but was saved as {fact.kept.key}")


def _lost(plan: SearchPlan, fact: StateLost) -> None:
    if fact.step not in _node(plan, fact.node).states:
        raise InternalError(f"state {fact.step} of node {fact.node} was lost but never saved")


def _on_node(
    plan: SearchPlan, fact: StateDiffers | ForkVerified | Audited | StageFailed | TrainingEnded | ChainLost
) -> None:
    _node(plan, fact.node)


def _on_nodes(plan: SearchPlan, fact: ChainStarted | ChainProlonged) -> None:
    for span in fact.spans:
        _node(plan, span.node)


def _node(plan: SearchPlan, id: NodeId) -> Node:
    if not 0 <= id < len(plan.nodes):
        raise InternalError(f"no node {id} in a plan of {len(plan.nodes)} nodes")
    return plan.nodes[id]


_CHECKS: dict[type, Callable[[SearchPlan, Any], None]] = {
    PlanCreated: _created,
    TrialAdded: _added,
    SearchStarted: _started,
    TargetAsked: _target,
    StateReached: _reached,
    StateLost: _lost,
    StateDiffers: _on_node,
    ForkVerified: _on_node,
    Audited: _on_node,
    StageFailed: _on_node,
    TrainingEnded: _on_node,
    ChainLost: _on_node,
    ChainStarted: _on_nodes,
    ChainProlonged: _on_nodes,
}


def in_other_format(format: int) -> StoreError:
    return StoreError(
        f"{other_format('this store', format, FORMAT, 'continue with that version')}, or choose another store"
    )
