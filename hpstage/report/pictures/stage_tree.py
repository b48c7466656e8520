"""The picture of the stage tree: where trials train as one, where they part, and what became of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import itemgetter

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hpstage.report.measured import merit
from hpstage.report.names import plain
from hpstage.report.pictures import style
from hpstage.report.views.stage_tree import Branch, StageTreeView
from hpstage.text import count_of

_ROW = 0.15  # inches per row, as long as there is room
_AROUND = 0.9  # inches above and below the rows
_LOWEST = 2.0  # inches: the names of the scale and its ticks have room
_FEWEST = 4  # rows that are taken to be there, so that few do not drift apart
_BAR = 2.6  # inches, the scale of colours at its longest

Segment = tuple[tuple[float, float], tuple[float, float]]


@style.in_our_style
def draw(view: StageTreeView) -> Figure:
    """See :func:`hpstage.report.draw_stage_tree`."""
    shown = view.branches
    if not shown:
        return style.nothing("No trial was asked for: there is no stage tree.")
    count = 1 + max(branch.row for branch in shown)
    height = min(style.TALLEST, max(_LOWEST, _AROUND + _ROW * count))
    pitch = 72 * (height - _AROUND) / max(_FEWEST, count)  # points from row to row
    figure, axes = style.figure(height)

    values = [branch.value for branch in shown if branch.value is not None]
    if len(set(values)) == 1:
        values = [value for branch in shown for _, value in branch.points]
    scale, shades = _scale(values, view.maximize), style.shades(view.maximize)
    tints: list[style.Colour] = [
        style.FAINT if branch.value is None else shades(float(scale(branch.value))) for branch in shown
    ]
    thin = min(1.2, max(0.5, 0.25 * pitch))
    most = math.log(max(2, *(branch.trials for branch in shown)))
    widths = [thin * (1 + 1.4 * math.log(branch.trials) / most) for branch in shown]

    legend = []
    if view.way:
        points = [point for row, start, stop in view.way for point in ((start, row), (stop, row))]
        axes.add_collection(LineCollection([points], colors=style.VERMILION, linewidths=max(widths) + 2.0, zorder=1))
        legend.append(Line2D([], [], color=style.VERMILION, linewidth=2.5, label=f"best: trial {view.best}"))
    _connect(axes, shown, tints, thin, maximize=view.maximize)
    lines: list[Segment] = [((branch.start, branch.row), (branch.stop, branch.row)) for branch in shown]
    axes.add_collection(LineCollection(lines, colors=tints, linewidths=widths, zorder=3, capstyle="butt"))
    dots = [(step, branch.row, value) for branch in shown for step, value in branch.points]
    if dots:
        x, y, colours = zip(*dots, strict=True)
        size = min(11.0, max(1.5, (0.6 * pitch) ** 2))
        axes.scatter(x, y, s=size, c=colours, norm=scale, cmap=shades, edgecolors="white", linewidths=0.25, zorder=4)
    hidden = view.nodes - len(shown)
    if hidden:
        legend.append(_tick_off(axes, shown, hidden))

    end = max(branch.stop for branch in shown)
    axes.set_xlim(-0.005 * end, 1.01 * end)
    middle, half = (count - 1) / 2, max(_FEWEST, count) / 2
    axes.set_ylim(middle + half + 0.2, middle - half - 0.2)
    axes.set_yticks([])
    axes.grid(axis="x", color=style.TRACK, linewidth=0.5)
    style.counts(axes.xaxis)
    style.label(axes, x="training step")
    trials, nodes = count_of(view.trials, "trial"), count_of(view.nodes, "node")
    style.title(axes, f"{trials} in {nodes}" + (" (the wider, the more trials)" if view.trials > 1 else ""))
    style.legend(axes, legend)
    _name_ends(axes, shown)
    if values:
        _show_scale(figure, scale, shades, plain(view.metric, 24), _extend(values, scale, view.maximize))
    return figure


def _show_scale(figure: Figure, scale: Normalize, shades: Colormap, metric: str, extend: str) -> None:
    """The scale of colours, beside the picture."""
    bar = figure.colorbar(
        ScalarMappable(scale, shades),
        ax=figure.axes,
        shrink=min(1.0, _BAR / figure.get_figheight()),
        anchor=(0.0, 1.0),
        aspect=25,
        pad=0.01,
        extend=extend,
    )
    bar.set_label(f"{metric}\nbest from here on", fontsize=style.LABEL, color=style.INK, parse_math=False)
    bar.ax.tick_params(labelsize=style.SMALL, labelcolor=style.INK, width=0.6, length=3)
    bar.outline.set_visible(False)


def _connect(
    axes: Axes, shown: Sequence[Branch], tints: Sequence[style.Colour], width: float, *, maximize: bool
) -> None:
    """From each line up to its parent's; the best on top, where several lie on each other."""
    below = [
        (merit(branch.value, maximize=maximize), branch, shown[branch.parent].row, tint)
        for branch, tint in zip(shown, tints, strict=True)
        if branch.parent is not None
    ]
    below.sort(key=itemgetter(0))
    segments: list[Segment] = [((branch.start, row), (branch.start, branch.row)) for _, branch, row, _ in below]
    colours = [tint for *_, tint in below]
    axes.add_collection(LineCollection(segments, colors=colours, linewidths=0.6 * width, zorder=2))


def _tick_off(axes: Axes, shown: Sequence[Branch], hidden: int) -> Line2D:
    """A tick where lines part that are not drawn. Returns what the legend says of them."""
    places = {(step, branch.row) for branch in shown for step in branch.hidden}
    ticks: list[Segment] = [((step, row), (step, row + 0.42)) for step, row in sorted(places)]
    axes.add_collection(LineCollection(ticks, colors=style.GREY, linewidths=0.5, zorder=2))
    roots = "" if places else ", from the first step on"
    return Line2D(
        [], [], color=style.GREY, linestyle="", marker="|", label=f"{count_of(hidden, 'node')} left out{roots}"
    )


def _name_ends(axes: Axes, shown: Sequence[Branch]) -> None:
    """The trials that end on a line, beside its end; above it where another line goes on from there."""
    goes_on = {(branch.row, branch.start) for branch in shown}
    for branch in shown:
        if branch.ends:
            above = (branch.row, branch.stop) in goes_on
            axes.annotate(
                branch.ends,
                (branch.stop, branch.row),
                xytext=(-2, 1.5) if above else (3, 0),
                textcoords="offset points",
                ha="right" if above else "left",
                va="bottom" if above else "center_baseline",
                fontsize=style.TINY,
                color=style.INK,
                parse_math=False,
                zorder=5,
            )


def _scale(values: Iterable[float], maximize: bool) -> Normalize:
    """From the value that one line in ten does worse than, to the best: a few that diverged do not flatten the rest."""
    ranked = sorted(values, reverse=not maximize)
    if not ranked:
        return Normalize(0.0, 1.0)
    worst, best = ranked[len(ranked) // 10], ranked[-1]
    low, high = min(worst, best), max(worst, best)
    if low == high:
        low, high = low - 0.5, high + 0.5
    return Normalize(low, high, clip=True)


def _extend(values: Sequence[float], scale: Normalize, maximize: bool) -> str:
    """Nothing is better than the best; worse than the scale's other end is one line in ten, if any."""
    low, high = float(scale.vmin or 0.0), float(scale.vmax or 0.0)
    if maximize:
        return "min" if min(values) < low else "neither"
    return "max" if max(values) > high else "neither"
