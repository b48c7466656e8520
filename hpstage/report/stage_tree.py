"""The picture of the stage tree: where trials train as one, where they part, and what became of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from hpstage.events import NodeId
from hpstage.nodes import Node, PlannedTrial
from hpstage.report import style
from hpstage.report.book import Book

_ROW = 0.17  # inches per row, as long as there is room
_TALLEST = 15.0  # inches; beyond, rows move together
_LABELLED = 7.0  # points from row to row; with less, the numbers of trials are left out
_BAR = 4.0  # inches, the scale of colours at its longest
_NAMED = 4  # trials named at the end of a row

Segment = tuple[tuple[float, float], tuple[float, float]]


@dataclass(slots=True)
class Lane:
    """A node as far as the study's trials go along it. ``value`` is the best that was measured on it or below it."""

    node: Node
    reach: int
    row: int = 0
    trials: int = 0
    ends: list[int] = field(default_factory=list)  # numbers of the trials that end on it, anywhere
    children: list[Lane] = field(default_factory=list)
    measured: list[tuple[int, float]] = field(default_factory=list)  # (step, value)
    value: float | None = None


def lay_out(trials: dict[int, PlannedTrial], metric: str | None, *, maximize: bool) -> list[Lane]:
    """The lanes of the trials' tree, parents first, each on its row.

    Below a lane come its children, the latest to part first; so no connector crosses a line. A child that goes on
    where its parent's lane ends takes over its row.
    """
    lanes: dict[NodeId, Lane] = {}
    for number, trial in trials.items():
        lane: Lane | None = None
        for node, _, stop in trial.legs(trial.asked):
            lane = lanes.setdefault(node.id, Lane(node, stop))
            lane.reach = max(lane.reach, stop)
            lane.trials += 1
        if lane is not None:
            lane.ends.append(number)
    roots = []
    for lane in lanes.values():
        if lane.node.parent is None:
            roots.append(lane)
        else:
            lanes[lane.node.parent.id].children.append(lane)
    ordered: list[Lane] = []
    waiting = sorted(roots, key=lambda lane: -lane.node.id)
    row = -1
    while waiting:
        lane = waiting.pop()
        parent = ordered[-1] if ordered else None
        if parent is not None and lane.node.parent is parent.node and lane.node.start == parent.reach:
            lane.row = parent.row
        else:
            row += 1
            lane.row = row
        ordered.append(lane)
        lane.children.sort(key=lambda child: (child.node.start, -child.trials, -child.node.id))
        waiting += lane.children
    for lane in reversed(ordered):
        lane.measured = _measured(lane, metric)
        values = [value for _, value in lane.measured] + [c.value for c in lane.children if c.value is not None]
        lane.value = (max if maximize else min)(values) if values else None
    return ordered


def _measured(lane: Lane, metric: str | None) -> list[tuple[int, float]]:
    found = []
    for step, state in sorted(lane.node.states.items()):
        value = None if state.metrics is None or metric is None else state.metrics.get(metric)
        if value is not None and step <= lane.reach and math.isfinite(value):
            found.append((step, value))
    return found


def draw_stage_tree(book: Book) -> Figure:
    """Each node a line from the step where it begins to where the study's trials leave it; the best trial's way marked.

    Colour is the best value of the metric found on a line or below it, and, for dots, the value measured there; width
    is the number of trials that train as one.
    """
    maximize, metric = book.maximize, book.metric
    numbers = {id: book.number(id) or index for index, id in enumerate(book.trials)}
    trials = {numbers[id]: trial for id, trial in book.trials.items()}
    lanes = lay_out(trials, metric, maximize=maximize)
    if not lanes:
        return style.nothing("No trial was asked for: there is no stage tree.")
    rows = 1 + max(lane.row for lane in lanes)
    height = min(_TALLEST, 1.4 + _ROW * max(4, rows))
    figure, axes = style.figure(height)
    pitch = 72 * (height - 1.4) / max(4, rows)  # points from row to row
    thin = min(1.3, max(0.5, 0.3 * pitch))
    most = max(lane.trials for lane in lanes)
    widths = [thin * (1 + 1.6 * math.log(lane.trials) / math.log(max(2, most))) for lane in lanes]

    values = [lane.value for lane in lanes if lane.value is not None]
    scale, shades = _scale(values, maximize), style.shades(maximize)
    tints: list[style.Colour] = [
        style.FAINT if lane.value is None else shades(float(scale(lane.value))) for lane in lanes
    ]

    best = book.best
    way = book.trials[best] if best is not None else None
    if way is not None and way.asked:  # the best may stem from an earlier call, of which this one knows no way
        by_node = {lane.node.id: lane for lane in lanes}
        marked = _way([(by_node[node.id], start, stop) for node, start, stop in way.legs(way.asked)])
        axes.add_collection(
            LineCollection(marked, colors=style.VERMILION, linewidths=max(widths) + 2.5, capstyle="round", zorder=1)
        )
    rows_of = {lane.node.id: lane.row for lane in lanes}
    connectors: list[tuple[float, Segment, style.Colour]] = []
    for lane, tint in zip(lanes, tints, strict=True):
        if lane.node.parent is not None:
            merit = -math.inf if lane.value is None else lane.value if maximize else -lane.value
            at = lane.node.start
            connectors.append((merit, ((at, rows_of[lane.node.parent.id]), (at, lane.row)), tint))
    connectors.sort(key=lambda connector: connector[0])  # the best on top, where several lie on each other
    axes.add_collection(
        LineCollection(
            [segment for _, segment, _ in connectors],
            colors=[tint for _, _, tint in connectors],
            linewidths=0.6 * thin,
            zorder=2,
        )
    )
    lines: list[Segment] = [((lane.node.start, lane.row), (lane.reach, lane.row)) for lane in lanes]
    axes.add_collection(LineCollection(lines, colors=tints, linewidths=widths, zorder=3))
    dots = [(step, lane.row, value) for lane in lanes for step, value in lane.measured]
    if dots:
        x, y, found = zip(*dots, strict=True)
        size = min(16.0, max(2.0, (0.75 * pitch) ** 2))
        axes.scatter(x, y, s=size, c=found, norm=scale, cmap=shades, edgecolors="white", linewidths=0.3, zorder=4)

    end = max(lane.reach for lane in lanes)
    axes.set_xlim(-0.005 * end, 1.02 * end)
    axes.set_ylim(rows - 0.2, -0.8)
    axes.set_yticks([])
    axes.grid(axis="x", color=style.TRACK, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("step", fontsize=style.SMALL, color=style.INK)
    title = f"{len(trials):,} trials in {len(lanes):,} nodes"
    if best is not None:
        title += f"; marked: the best, trial {numbers[best]}"
    axes.set_title(title, loc="left", fontsize=10, color=style.INK)
    if pitch >= _LABELLED:
        goes_on = {(lane.row, lane.node.start) for lane in lanes}
        for lane in lanes:
            # Beside the line's end; above it where another line goes on from there.
            above = (lane.row, lane.reach) in goes_on
            if lane.ends:
                axes.annotate(
                    _names(lane.ends),
                    (lane.reach, lane.row),
                    xytext=(-2, 2) if above else (4, 0),
                    textcoords="offset points",
                    ha="right" if above else "left",
                    va="bottom" if above else "center",
                    fontsize=6,
                    color=style.INK,
                    zorder=5,
                )
    if values:
        bar = figure.colorbar(
            ScalarMappable(scale, shades),
            ax=axes,
            shrink=min(1.0, _BAR / height),
            anchor=(0.0, 1.0),
            aspect=25,
            pad=0.01,
            extend="min" if maximize else "max",  # nothing is better than the best
        )
        bar.set_label(
            f"{metric} (best on the line or below it)", fontsize=style.SMALL, color=style.INK, parse_math=False
        )
        bar.ax.tick_params(labelsize=style.SMALL, labelcolor=style.INK)
        bar.outline.set_visible(False)
    return figure


def _way(legs: Sequence[tuple[Lane, int, int]]) -> list[list[tuple[float, float]]]:
    """A trial's way as one line: along each lane, and over to the next."""
    points: list[tuple[float, float]] = []
    for lane, start, stop in legs:
        points += [(start, lane.row), (stop, lane.row)]
    return [points]


def _scale(values: Sequence[float], maximize: bool) -> Normalize:
    """From the value that one line in ten does worse than, to the best: a few that diverged do not flatten the rest."""
    if not values:
        return Normalize(0.0, 1.0)
    ranked = sorted(values, reverse=not maximize)
    worst, best = ranked[len(ranked) // 10], ranked[-1]
    low, high = min(worst, best), max(worst, best)
    if low == high:
        low, high = low - 0.5, high + 0.5
    return Normalize(low, high, clip=True)


def _names(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in sorted(numbers)[:_NAMED])
    return shown if len(numbers) <= _NAMED else f"{shown} + {len(numbers) - _NAMED}"
