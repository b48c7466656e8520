"""The metric by step: one curve as long as trials share training, which diverges at each branch point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from hpstage.accounting.book import Book
from hpstage.accounting.branches import Measured, TreeBranch, can_be_drawn, foremost
from hpstage.errors.text import count_of
from hpstage.plan.facts import NodeId
from hpstage.report.names import plain, trial_name
from hpstage.report.pictures import style

_MOST_ROWS = 600  # maximum number of rows of the stage tree that are drawn; more are illegible
_HEIGHT = 3.6
_COMMON = 1e3  # ratio of the largest common value to the smallest above which the axis is logarithmic
_FAR = 10.0  # a value farther from the common values than this many times their width has diverged


@style.in_our_style
def draw_metrics(book: Book) -> Figure:
    """Draw the first objective against the training step: each node once, with the best trial's path on top."""
    metric, branches, found = book.metric, book.branches, book.measured
    if metric is None or not branches:
        return style.nothing("No trial was requested: there are no curves.")
    best = None if book.best is None else book.trials[book.best]
    way = {} if best is None else {node.id: stop for node, _, stop in best.path_to(best.requested)}
    shown = foremost(branches, book.ranking, _MOST_ROWS, always=way)
    drawn = curves(shown, found)
    if not drawn:
        return style.nothing(f"There is no finite value of {plain(metric)}.")
    points = [(branch.node.id, step, value) for branch in shown for step, value in found[branch.node.id].points]
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
            rasterized=count > style.MOST_SHAPES,
        )
    )
    _, x, y = zip(*points, strict=True)
    size = 9.0 if count <= 60 else 4.0 if count <= 300 else 1.5
    many = len(points) > style.MOST_SHAPES
    axes.scatter(x, y, s=size, color=style.BLUE, alpha=alpha, linewidths=0, zorder=3, rasterized=many)
    handles = [
        Line2D(
            [],
            [],
            color=style.BLUE,
            marker="o",
            markersize=2.5,
            linewidth=0.9,
            label="branch (wider: more trials)",
        )
    ]
    if best is not None:
        passed = [(step, value) for node, step, value in points if step <= way.get(node, -1)]
        xs, ys = zip(*passed, strict=True) if passed else ((), ())
        name = f"best: trial {trial_name(book, best.id)}"
        [line] = axes.plot(xs, ys, color=style.VERMILION, linewidth=1.8, marker="o", markersize=3, label=name, zorder=4)
        handles.append(line)
    outside = _limit(axes, y, book.maximize)
    axes.set_xlim(0.0, 1.015 * max(x))
    axes.grid(color=style.TRACK, linewidth=0.5)
    axes.tick_params(axis="y", length=0)
    style.counts(axes.xaxis)
    style.label(axes, x="training step", y=plain(metric, 40))
    notes = [count_of(len(book.trials), "trial")]
    if len(branches) > len(shown):
        notes.append(f"{count_of(len(branches) - len(shown), 'node')} left out")
    if outside:
        notes.append(f"{count_of(outside, 'value')} beyond the axis")
    if not_finite := _not_finite(shown, metric):
        notes.append(f"{not_finite:,} not finite")
    style.title(axes, ", ".join(notes))
    style.legend(axes, handles)
    return figure


def _limit(axes: Axes, values: Sequence[float], maximize: bool) -> int:
    """Scale the y axis to all values that did not diverge, and return the number of values that did.

    Common values are the middle 80 % of all values. If they span more than three decades, the axis is logarithmic. A
    value that is worse than the common values, by more than ten times their width, has diverged.
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


Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """The values measured on a node, preceded by the last value measured on the node's ancestors, if any."""

    node: NodeId
    points: list[Point]
    trials: int


def curves(shown: Sequence[TreeBranch], found: dict[NodeId, Measured]) -> list[Curve]:
    """Return a curve for each branch with measured values. ``shown`` has parents before children, and all parents."""
    tails: dict[NodeId, list[Point]] = {}  # by node: the values that curves of its children may begin with
    drawn = []
    for branch in shown:
        node = branch.node
        own: list[Point] = [(float(step), value) for step, value in found[node.id].points]
        inherited = [] if node.parent is None else tails[node.parent.id]
        before = [point for point in inherited if point[0] <= node.start][-1:]
        # A child may diverge before the first value of its parent: its curve then begins at a value of the grandparent.
        tails[node.id] = [*before, *own]
        if own:
            drawn.append(Curve(node.id, [*before, *own], branch.trials))
    return drawn


def _not_finite(shown: Sequence[TreeBranch], metric: str) -> int:
    return sum(
        state.metrics is not None and metric in state.metrics and not can_be_drawn(state.metrics[metric])
        for branch in shown
        for step, state in branch.node.states.items()
        if step <= branch.reach
    )
