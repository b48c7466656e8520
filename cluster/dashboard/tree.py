"""The stage tree as it is drawn: lanes on rows, cut into pieces by what has become of them. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from hpstage.cluster.dashboard.board import PlanView
from hpstage.cluster.dashboard.study import StudyView
from hpstage.events import NodeId
from hpstage.nodes import Node
from hpstage.report.lanes import Lane
from hpstage.report.lanes import rows as lay_out

MOST_LANES = 1200
"""Lanes drawn: more than a screen has rows for."""
_MOST_TEXT = 160

PieceState = Literal["done", "reused", "running", "ready", "waiting", "failed"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Steps ``[start, stop)`` of a node, all in one state."""

    row: int
    node: NodeId
    start: int
    stop: int
    state: PieceState
    trials: int
    values: str


@dataclass(frozen=True, slots=True)
class Tree:
    """``joins``: ``(step, row, row)``, where a lane parts from its parent. ``hidden``: lanes left out."""

    pieces: list[Piece]
    joins: list[tuple[int, int, int]]
    rows: int
    hidden: int


def draw(view: PlanView, study: StudyView, most: int = MOST_LANES) -> Tree:
    """The study's tree; of one that is too large, the lanes that most trials go along, and those that run."""
    running = _running(view)
    lanes = _chosen(study, running, most)
    rows = lay_out(lanes)
    pieces: list[Piece] = []
    failed: set[NodeId] = set()  # nodes that training cannot reach
    for lane in lanes:
        node = lane.node
        parent = node.parent
        if parent is not None and (parent.id in failed or view.failed.get(parent.id, node.start) < node.start):
            failed.add(node.id)
        values = _values(node)
        pieces += [
            Piece(rows[node.id], node.id, start, stop, state, lane.trials, values)
            for start, stop, state in _cut(view, study, lane, running.get(node.id), node.id in failed)
        ]
    joins = [(lane.node.start, rows[lane.node.parent.id], rows[lane.node.id]) for lane in lanes if lane.node.parent]
    return Tree(pieces, joins, 1 + max(rows.values(), default=-1), len(study.lanes) - len(lanes))


def _running(view: PlanView) -> dict[NodeId, int]:
    """The step to which each node is being trained."""
    ahead: dict[NodeId, int] = {}
    for chain in view.plan.chains.values():
        for stretch in chain.ahead():
            ahead[stretch.node] = max(stretch.stop, ahead.get(stretch.node, 0))
    return ahead


def _cut(
    view: PlanView, study: StudyView, lane: Lane, running: int | None, unreachable: bool
) -> Iterator[tuple[int, int, PieceState]]:
    node, reach = lane.node, lane.reach
    at = node.start
    for stop, owner in view.trained.get(node.id, ()):
        if at < reach:
            yield at, min(stop, reach), "done" if owner in ("", study.name) else "reused"
        at = stop
    if at < reach and running is not None and running > at:
        yield at, min(running, reach), "running"
        at = running
    if at < reach:
        if unreachable or view.failed.get(node.id, reach) < reach:
            yield at, reach, "failed"
        else:
            ready = running is None and (
                at > node.start or node.parent is None or view.front(node.parent.id) >= node.start
            )
            yield at, reach, "ready" if ready else "waiting"


def _chosen(study: StudyView, running: Iterable[NodeId], most: int) -> list[Lane]:
    """Lanes of nodes in the order of their ids, and so parents before children; with each lane its parent's."""
    lanes: Iterable[Lane] = study.lanes.values()
    if len(study.lanes) > most:
        # A parent has at least the trials of its child, and the smaller id.
        kept = {
            lane.node.id: lane
            for lane in heapq.nsmallest(most, study.lanes.values(), key=lambda lane: (-lane.trials, lane.node.id))
        }
        for id in running:
            lane = study.lanes.get(id)
            for node in () if lane is None else lane.node.ancestry():
                kept[node.id] = study.lanes[node.id]
        lanes = kept.values()
    return sorted(lanes, key=lambda lane: lane.node.id)


def _values(node: Node) -> str:
    return values_text(node, node.start)


def values_text(node: Node, step: int) -> str:
    """The hyper-parameters in training step ``step``; those that the node has changed come first."""
    values = node.hyperparameters(step)
    before = {} if node.parent is None or not node.start else node.parent.hyperparameters(node.start - 1)
    names = sorted(values, key=lambda name: (name in before and before[name] == values[name], name))
    text = ", ".join(f"{name} {_short(values[name])}" for name in names)
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "…"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
