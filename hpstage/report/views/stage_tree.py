"""What the picture of the stage tree shows: where trials train as one, where they part, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpstage.plan.facts import NodeId, TrialId
from hpstage.report import lanes as lay_out
from hpstage.report.book import Book
from hpstage.report.lanes import Lane
from hpstage.report.names import plain

MOST_ROWS = 140
"""Rows that are shown: more than that cannot be told apart on a page."""
_MOST_NAMED = 89
"""Rows: with more there is no room for the numbers of trials."""
_NAMED = 4  # trials that are named at the end of a line

Point = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Branch:
    """A lane: a node as far as the book's trials go along it."""

    parent: int | None
    """Its parent's place in the list."""
    row: int
    start: int
    stop: int
    trials: int
    value: float | None
    """The best of the metric that was measured on it or below it."""
    points: list[Point]
    """What was measured on it, by step."""
    hidden: list[int]
    """Steps at which lanes part that are not shown."""
    ends: str
    """Names of trials that end on it; empty where there is no room, or where they would not tell whose."""


@dataclass(frozen=True, slots=True)
class StageTreeView:
    branches: list[Branch]
    """Parents before children; none if nothing was asked for."""
    way: list[tuple[int, int, int]]
    """Of the best trial: ``(row, start, stop)``."""
    best: str
    """Its name."""
    metric: str | None
    maximize: bool
    trials: int
    nodes: int
    """With those that are not shown."""


def stage_tree_view(book: Book) -> StageTreeView:
    """Of a tree with more than 140 rows those lanes are shown that most trials go along, among equals the best."""
    lanes, found = book.lanes, book.measured
    best = book.trials[book.best] if book.best is not None else None
    legs = [] if best is None else list(best.legs(best.asked))
    shown = lay_out.foremost(lanes, book.ranking, MOST_ROWS, always=[node.id for node, _, _ in legs])
    rows = lay_out.rows(shown)
    place = {lane.node.id: index for index, lane in enumerate(shown)}
    ends = _ends(book, shown) if max(rows.values(), default=0) < _MOST_NAMED else {}
    branches = [
        Branch(
            parent=None if lane.node.parent is None else place[lane.node.parent.id],
            row=rows[lane.node.id],
            start=lane.node.start,
            stop=lane.reach,
            trials=lane.trials,
            value=found[lane.node.id].value,
            points=found[lane.node.id].points,
            hidden=sorted({child.node.start for child in lane.children if child.node.id not in place}),
            ends=ends.get(lane.node.id, ""),
        )
        for lane in shown
    ]
    return StageTreeView(
        branches=branches,
        way=[(rows[node.id], start, stop) for node, start, stop in legs],
        best="" if best is None else trial_name(book, best.id),
        metric=book.metric,
        maximize=book.maximize,
        trials=len(book.trials),
        nodes=len(lanes),
    )


def _ends(book: Book, shown: Sequence[Lane]) -> dict[NodeId, str]:
    """Who ends on each lane, if anybody does."""
    if book.study is None and len({book.account.plan.study_of(id) for id in book.trials}) > 1:
        return {}  # numbers would not tell whose
    found: dict[NodeId, list[str]] = {lane.node.id: [] for lane in shown}
    for id, trial in book.trials.items():
        if trial.asked and (names := found.get(trial.node_at(trial.asked).id)) is not None:
            names.append(trial_name(book, id))
    return {id: _listed(names) for id, names in found.items() if names}


def trial_name(book: Book, trial: TrialId) -> str:
    """Its number in its study; the end of its id where no study numbered it."""
    number = book.number(trial)
    return plain(trial.rpartition("/")[2], 12) if number is None else str(number)


def _listed(names: Sequence[str]) -> str:
    ordered = sorted(names, key=lambda name: (len(name), name))
    shown = ", ".join(ordered[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} + {len(names) - _NAMED}"
