"""A lane cut into stages by what has become of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, get_args

from hpstage.plan.events import NodeId

if TYPE_CHECKING:
    from hpstage.cluster.dashboard.board import PlanView
    from hpstage.cluster.dashboard.study import Lane

PieceState = Literal["waiting", "ready", "running", "done", "reused", "failed"]
STATES: tuple[PieceState, ...] = get_args(PieceState)


def running(view: PlanView) -> dict[NodeId, int]:
    """The step to which each node is being trained. O(open chains)."""
    ahead: dict[NodeId, int] = {}
    for chain in view.plan.chains.values():
        for stretch in chain.ahead():
            ahead[stretch.node] = max(stretch.stop, ahead.get(stretch.node, 0))
    return ahead


def cut(view: PlanView, study: str, lane: Lane, running: int | None) -> Iterator[tuple[int, int, PieceState]]:
    """``(start, stop, state)`` of each piece of a lane of ``study``'s, from its node's start to its reach."""
    node, reach = lane.node, lane.reach
    at = node.start
    for stop, owner in view.trained.get(node.id, ()):
        if at < reach:
            yield at, min(stop, reach), "done" if owner in ("", study) else "reused"
        at = stop
    if at < reach and running is not None and running > at:
        yield at, min(running, reach), "running"
        at = running
    if at < reach:
        if view.failed.get(node.id, reach) < reach or view.is_out_of_reach(node):
            yield at, reach, "failed"
        else:
            ready = running is None and (
                at > node.start or node.parent is None or view.front(node.parent.id) >= node.start
            )
            yield at, reach, "ready" if ready else "waiting"
