"""What the picture of the metric shows: curves that are one as long as trials train as one, and part where they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpstage.plan.facts import NodeId
from hpstage.report import lanes as lay_out
from hpstage.report.book import Book
from hpstage.report.lanes import Lane
from hpstage.report.measured import Measured, can_be_drawn
from hpstage.report.views.stage_tree import trial_name

MOST_ROWS = 600
"""Rows of the stage tree whose nodes are shown: more than that are a blot."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """What was measured on a node, led by the last that was measured before it on its line, if anything was."""

    node: NodeId
    points: list[Point]
    trials: int


@dataclass(frozen=True, slots=True)
class MetricsView:
    metric: str | None
    """``None``: nothing was asked for."""
    maximize: bool
    curves: list[Curve]
    points: list[Point]
    """All that was measured on the nodes that are shown, each once."""
    best: str | None
    """The name of the best trial."""
    way: list[Point]
    """What was measured on its way."""
    trials: int
    hidden: int
    """Nodes that are not shown."""
    not_finite: int
    """Values on those that are."""


def metrics_view(book: Book) -> MetricsView:
    """The first objective."""
    metric, lanes, found = book.metric, book.lanes, book.measured
    best = book.trials[book.best] if book.best is not None else None
    way = {} if best is None else {node.id: stop for node, _, stop in best.legs(best.asked)}
    shown = lay_out.foremost(lanes, book.ranking, MOST_ROWS, always=way)
    return MetricsView(
        metric=metric if lanes else None,
        maximize=book.maximize,
        curves=curves(shown, found),
        points=[point for lane in shown for point in found[lane.node.id].points],
        best=None if best is None else trial_name(book, best.id),
        way=[point for lane in shown for point in found[lane.node.id].points if point[0] <= way.get(lane.node.id, -1)],
        trials=len(book.trials),
        hidden=len(lanes) - len(shown),
        not_finite=0 if metric is None else _not_finite(shown, metric),
    )


def curves(shown: Sequence[Lane], found: dict[NodeId, Measured]) -> list[Curve]:
    """A curve for each lane on which something was measured. ``shown``: parents before children, with all parents."""
    tails: dict[NodeId, list[Point]] = {}  # of each node, all that was measured on its line where its children look
    drawn = []
    for lane in shown:
        node = lane.node
        own: list[Point] = [(float(step), value) for step, value in found[node.id].points]
        inherited = [] if node.parent is None else tails[node.parent.id]
        before = [point for point in inherited if point[0] <= node.start][-1:]
        # A child may part before the first measurement on its parent: then it goes on from the grandparent's.
        tails[node.id] = [*before, *own]
        if own:
            drawn.append(Curve(node.id, [*before, *own], lane.trials))
    return drawn


def _not_finite(shown: Sequence[Lane], metric: str) -> int:
    return sum(
        state.metrics is not None and metric in state.metrics and not can_be_drawn(state.metrics[metric])
        for lane in shown
        for step, state in lane.node.states.items()
        if step <= lane.reach
    )
