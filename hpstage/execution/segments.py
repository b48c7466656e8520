"""Which steps of a plan are trained again, and what they are compared with. Pure."""

from __future__ import annotations

from hpstage.execution.retraining import Compared, Segment
from hpstage.plan.facts import to_metrics
from hpstage.plan.messages import Audit, Stage
from hpstage.plan.nodes import Node, PlannedTrial, State


def whole(trial: PlannedTrial) -> Segment:
    """Return all of a trial up to its last result, from nothing: without capture if the state there is still kept,
    whose tensors are then compared, and else with it, by the digests of states."""
    last = trial.node_at(trial.answered).state(trial.answered)
    return segment_of(trial, trial.answered, captured=last is None or last.kept is None)


def segment_of(
    trial: PlannedTrial, stop: int | None = None, *, start: int = 0, numerics: str = "", captured: bool = True
) -> Segment:
    """Return a part of a trial, compared with all that is known of the states on its way.

    Args:
        stop: the number of steps after which it ends; ``None``: where the trial ends.
        start: a step after which a state is kept, to begin with; 0: from nothing.
        numerics: the step backend, where the trainable leaves the choice to the search.
        captured: see :class:`Segment`.
    """
    stop = trial.requested if stop is None else stop
    path = [(node, max(begun, start), end) for node, begun, end in trial.path_to(stop) if end > start]
    states = [state for state in trial.states() if start < state.step <= stop]
    source = trial.node_at(start).state(start) if start else None
    assert start == 0 or (source is not None and source.kept is not None), "training begins with a saved state"
    return Segment(
        initial=trial.root.hyperparameters(0),
        stages=tuple(_stage(node, begun, end) for node, begun, end in path),
        stop=stop,
        source=None if source is None or source.kept is None else source.kept.key,
        compared=tuple(_compared(state, state.digest) for state in states if state.digest is not None),
        metrics={state.step: to_metrics(state.metrics) for state in states if state.metrics is not None},
        numerics=numerics,
        captured=captured,
    )


def _compared(state: State, digest: str) -> Compared:
    key = state.node.seen(state.step).key(state.step)
    return Compared(state.step, key, digest, "" if state.kept is None else state.kept.marks)


def audited(audit: Audit) -> Segment:
    """Return what an audit trains again."""
    return Segment(
        initial=audit.initial,
        stages=audit.stages,
        stop=audit.stages[-1].stop,
        source=audit.source,
        compared=tuple(Compared(goal.step, goal.key, goal.digest) for goal in audit.goals),
        metrics={goal.step: goal.metrics for goal in audit.goals if goal.metrics},
        numerics=audit.numerics,
        captured=not audit.whole,
    )


def _stage(node: Node, start: int, stop: int) -> Stage:
    forms = dict(zip(node.names, node.forms, strict=True))
    return Stage(node.id, start, stop, forms, node.seen(start + 1).digest)
