"""The picture of the metric: curves that are one as long as trials train as one, and part where they do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from hpstage.events import NodeId
from hpstage.report import lanes as lay_out
from hpstage.report import style
from hpstage.report.book import Book
from hpstage.report.lanes import Lane
from hpstage.report.measured import Measured, can_be_drawn, merit
from hpstage.report.stage_tree import trial_name

MOST_ROWS = 600
"""Rows of the stage tree whose nodes are drawn: more than that are a blot."""
_HEIGHT = 3.6
_COMMON = 1e3  # between the largest of the common values and the smallest; beyond, the axis is logarithmic
_FAR = 10.0  # times the width of the common values

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """What was measured on a node, led by the last that was measured before it on its line, if anything was."""

    node: NodeId
    points: list[Point]
    trials: int


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


def draw_metrics(book: Book) -> Figure:
    """The first objective against the training step; each node is drawn once, and the best trial's way on top."""
    metric = book.metric
    lanes = book.lanes
    if metric is None or not lanes:
        return style.nothing("No trial was asked for: there are no curves.")
    maximize = book.maximize
    found = book.measured
    best = book.trials[book.best] if book.best is not None else None
    way = {} if best is None else {node.id: stop for node, _, stop in best.legs(best.asked)}
    shown = lay_out.foremost(
        lanes, MOST_ROWS, lambda lane: merit(found[lane.node.id].value, maximize=maximize), always=way
    )
    drawn = curves(shown, found)
    if not drawn:
        return style.nothing(f"There is no finite value of {style.plain(metric)}.")
    figure, axes = style.figure(_HEIGHT)
    count = len(drawn)
    width, alpha = (0.9, 0.8) if count <= 60 else (0.6, 0.5) if count <= 300 else (0.4, 0.25)
    most = math.log(max(2, *(curve.trials for curve in drawn)))
    axes.add_collection(
        LineCollection(
            [curve.points for curve in drawn],
            colors=style.BLUE,
            alpha=alpha,
            linewidths=[width * (1 + 1.2 * math.log(curve.trials) / most) for curve in drawn],
            capstyle="round",
            zorder=2,
        )
    )
    points = [point for lane in shown for point in found[lane.node.id].points]
    x, y = zip(*points, strict=True)
    size = 9.0 if count <= 60 else 4.0 if count <= 300 else 1.5
    axes.scatter(x, y, s=size, color=style.BLUE, alpha=alpha, linewidths=0, zorder=3)
    handles = [
        Line2D(
            [],
            [],
            color=style.BLUE,
            marker="o",
            markersize=2.5,
            linewidth=0.9,
            label="node (the wider, the more trials)",
        )
    ]
    if best is not None and book.best is not None:
        mine = [
            (step, value)
            for lane in shown
            if lane.node.id in way
            for step, value in found[lane.node.id].points
            if step <= way[lane.node.id]
        ]
        xs, ys = zip(*mine, strict=True) if mine else ((), ())
        name = f"best: trial {trial_name(book, book.best)}"
        [line] = axes.plot(xs, ys, color=style.VERMILION, linewidth=1.8, marker="o", markersize=3, label=name, zorder=4)
        handles.append(line)
    outside = _limit(axes, [value for _, value in points], maximize)
    end = max(step for step, _ in points)
    axes.set_xlim(0.0, 1.015 * end)
    axes.grid(color=style.TRACK, linewidth=0.5)
    axes.tick_params(axis="y", length=0)
    style.counts(axes.xaxis)
    style.label(axes, x="training step", y=style.plain(metric, 40))
    notes = [style.counted(len(book.trials), "trial")]
    if len(shown) < len(lanes):
        notes.append(f"{style.counted(len(lanes) - len(shown), 'node')} left out")
    if outside:
        notes.append(f"{style.counted(outside, 'value')} beyond the axis")
    missing = _not_finite(shown, metric)
    if missing:
        notes.append(f"{missing:,} not finite")
    style.title(axes, ", ".join(notes))
    style.legend(axes, handles)
    return figure


def _limit(axes: Axes, values: list[float], maximize: bool) -> int:
    """Scale the y axis to all values but those that diverged. Returns how many these are.

    The middle eight tenths of the values tell what is common. Where they go over more than three decades, the axis is
    logarithmic. A value that lies ten times their width outside has diverged, unless it is better than they are.
    """
    ranked = sorted(values)
    tenth = len(ranked) // 10
    logarithmic = ranked[0] > 0 and ranked[-1 - tenth] / ranked[tenth] > _COMMON
    if logarithmic:
        ranked = [math.log10(value) for value in ranked]
    low, high = ranked[tenth], ranked[-1 - tenth]
    reach = _FAR * (high - low) if high > low else math.inf
    kept = [v for v in ranked if (maximize or v <= high + reach) and (not maximize or v >= low - reach)]
    bottom, top = kept[0], kept[-1]
    room = 0.04 * (top - bottom) or 0.05 * abs(top) or 0.5
    bottom, top = bottom - room, top + room
    if logarithmic:
        axes.set_yscale("log")
        axes.tick_params(axis="y", which="minor", length=0)
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(10**bottom, 10**top)
    else:
        axes.set_ylim(bottom, top)
    return len(ranked) - len(kept)


def _not_finite(shown: Sequence[Lane], metric: str) -> int:
    return sum(
        state.metrics is not None and metric in state.metrics and not can_be_drawn(state.metrics[metric])
        for lane in shown
        for step, state in lane.node.states.items()
        if step <= lane.reach
    )
