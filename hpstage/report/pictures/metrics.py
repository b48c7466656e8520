"""The picture of the metric: curves that are one as long as trials train as one, and part where they do."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from hpstage.report.names import plain
from hpstage.report.pictures import style
from hpstage.report.views.metrics import MetricsView
from hpstage.text import count_of

_HEIGHT = 3.6
_COMMON = 1e3  # between the largest of the common values and the smallest; beyond, the axis is logarithmic
_FAR = 10.0  # times the width of the common values


@style.in_our_style
def draw(view: MetricsView) -> Figure:
    """See :func:`hpstage.report.draw_metrics`."""
    if view.metric is None:
        return style.nothing("No trial was asked for: there are no curves.")
    drawn = view.curves
    if not drawn:
        return style.nothing(f"There is no finite value of {plain(view.metric)}.")
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
    x, y = zip(*view.points, strict=True)
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
    if view.best is not None:
        xs, ys = zip(*view.way, strict=True) if view.way else ((), ())
        name = f"best: trial {view.best}"
        [line] = axes.plot(xs, ys, color=style.VERMILION, linewidth=1.8, marker="o", markersize=3, label=name, zorder=4)
        handles.append(line)
    outside = _limit(axes, [value for _, value in view.points], view.maximize)
    end = max(step for step, _ in view.points)
    axes.set_xlim(0.0, 1.015 * end)
    axes.grid(color=style.TRACK, linewidth=0.5)
    axes.tick_params(axis="y", length=0)
    style.counts(axes.xaxis)
    style.label(axes, x="training step", y=plain(view.metric, 40))
    notes = [count_of(view.trials, "trial")]
    if view.hidden:
        notes.append(f"{count_of(view.hidden, 'node')} left out")
    if outside:
        notes.append(f"{count_of(outside, 'value')} beyond the axis")
    if view.not_finite:
        notes.append(f"{view.not_finite:,} not finite")
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
