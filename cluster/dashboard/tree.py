"""The stage tree as drawn: lanes on rows, cut into pieces by state. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from hpstage.cluster.dashboard.board import PlanView, cut, running
from hpstage.cluster.dashboard.pieces import PieceState
from hpstage.cluster.dashboard.study import StudyLane, StudyView
from hpstage.plan.facts import NodeId
from hpstage.plan.nodes import Node
from hpstage.report.lanes import rows as lay_out
from hpstage.text import shortened

MOST_LANES = 1200
"""Maximum number of lanes drawn: more than a screen has rows."""
_MOST_TEXT = 160


@dataclass(frozen=True, slots=True)
class Piece:
    """Steps ``[start, stop)`` of a node that are in the same state."""

    row: int
    node: NodeId
    start: int
    stop: int
    state: PieceState
    trials: int
    values: str


@dataclass(frozen=True, slots=True)
class Tree:
    """``joins``: ``(step, row, row)`` where a lane forks from its parent. ``hidden``: number of lanes left out."""

    pieces: list[Piece]
    joins: list[tuple[int, int, int]]
    rows: int
    hidden: int


def draw(view: PlanView, study: StudyView, most: int = MOST_LANES) -> Tree:
    """Draw the study's tree; if it is too large, only the lanes used by most trials, and those being trained."""
    ahead = running(view)
    lanes = _chosen(study, ahead, most)
    rows = lay_out(lanes)
    pieces: list[Piece] = []
    for lane in lanes:
        node = lane.node
        lane.values = lane.values or values_text(node, node.start)
        pieces += [
            Piece(rows[node.id], node.id, start, stop, state, lane.trials, lane.values)
            for start, stop, state in cut(view, study.name, lane, ahead.get(node.id))
        ]
    joins = [(lane.node.start, rows[lane.node.parent.id], rows[lane.node.id]) for lane in lanes if lane.node.parent]
    return Tree(pieces, joins, 1 + max(rows.values(), default=-1), len(study.lanes) - len(lanes))


def _chosen(study: StudyView, running: Iterable[NodeId], most: int) -> list[StudyLane]:
    """Return lanes in the order of their nodes' ids, hence parents before children, each with its parent's lane."""
    lanes: Iterable[StudyLane] = study.lanes.values()
    if len(study.lanes) > most:
        # A parent has at least as many trials as its child, and the smaller id.
        least = sorted([lane.trials for lane in lanes], reverse=True)[most - 1]
        kept = {id: lane for id, lane in study.lanes.items() if lane.trials > least}
        tied = heapq.nsmallest(most - len(kept), [id for id, lane in study.lanes.items() if lane.trials == least])
        kept |= {id: study.lanes[id] for id in tied}
        for id in running:
            lane = study.lanes.get(id)
            for node in () if lane is None else lane.node.ancestry():
                kept[node.id] = study.lanes[node.id]
        lanes = kept.values()
    return sorted(lanes, key=lambda lane: lane.node.id)


def values_text(node: Node, step: int) -> str:
    """Return the hyper-parameters at training step ``step`` as text; those changed by the node come first."""
    values = node.hyperparameters(step)
    before = {} if node.parent is None or not node.start else node.parent.hyperparameters(node.start - 1)
    names = sorted(values, key=lambda name: (name in before and before[name] == values[name], name))
    text = ", ".join(f"{name} {shortened(values[name])}" for name in names)
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "…"
