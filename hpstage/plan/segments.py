"""Segments: steps of a plan that are trained again, with the states to compare them with. Pure."""

from __future__ import annotations

from collections.abc import Container

from hpstage.plan.facts import Metrics, StateKey, to_metrics
from hpstage.plan.messages import Compared, Segment, Stage
from hpstage.plan.nodes import Node, PlannedTrial, State


def whole(trial: PlannedTrial) -> Segment:
    """Return the whole of a trial, from the start of training to its last result.

    If the last state is still saved, it is trained without capture, and the tensors are compared; otherwise with
    capture, and the digests of states are compared.
    """
    node = trial.node_at(trial.answered)
    last = node.state(trial.answered)
    return segment_of(node, trial.answered, captured=last is None or last.kept is None)


def segment_of(
    node: Node,
    stop: int,
    *,
    source: State | None = None,
    objectives: Container[str] | None = None,
    numerics: str = "",
    captured: bool = True,
) -> Segment:
    """Return a segment of a node's branch, with the known states and metrics on its way to compare with.

    Args:
        stop: the number of steps after which it ends.
        source: the saved state on the branch to begin with; ``None``: training begins from scratch.
        objectives: names of the metrics to compare, at saved states only; ``None``: all known metrics.
        numerics: the step backend, where the trainable leaves the choice to the search.
        captured: see :class:`Segment`.
    """
    begin = 0 if source is None else source.step
    path = [(part, max(start, begin), end) for part, start, end in node.path_to(stop) if end > begin]
    # All reports on the way are repeated, since evaluating may change objects that no step reads.
    states = [part.states[step] for part, start, end in path for step in sorted(part.states) if start < step <= end]
    metrics: dict[int, Metrics] = {}
    for state in states:
        known = state.metrics or {}
        if objectives is not None:
            known = {name: known[name] for name in known if name in objectives and state.digest is not None}
        if known:
            metrics[state.step] = to_metrics(known)
    return Segment(
        initial=node.ancestry()[0].hyperparameters(0),
        stages=tuple(stage_of(part, start, end) for part, start, end in path),
        stop=stop,
        source=None if source is None else _key(source),
        compared=tuple(
            Compared(state.step, _key(state), state.digest, "" if state.kept is None else state.kept.marks)
            for state in states
            if state.digest is not None
        ),
        metrics=metrics,
        numerics=numerics,
        captured=captured,
    )


def stage_of(node: Node, start: int, stop: int, *, verify: bool = False) -> Stage:
    """Return the stage of a node between two steps."""
    forms = dict(zip(node.names, node.forms, strict=True))
    return Stage(node.id, start, stop, forms, node.history_before(start + 1).digest, verify)


def _key(state: State) -> StateKey:
    return state.node.history_before(state.step).key(state.step)
