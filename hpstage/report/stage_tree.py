"""The picture of the stage tree: where trials train as one, where they part, and what became of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hpstage.events import NodeId, TrialId
from hpstage.report import lanes as lay_out
from hpstage.report import style
from hpstage.report.book import Book
from hpstage.report.lanes import Lane
from hpstage.report.measured import merit

MOST_ROWS = 140
"""Rows drawn: more than that cannot be told apart on a page."""
_ROW = 0.15  # inches per row, as long as there is room
_AROUND = 0.9  # inches above and below the rows
_LABELLED = 6.5  # points from row to row; with less, the numbers of trials are left out
_LOWEST = 2.0  # inches: the names of the scale and its ticks have room
_FEWEST = 4  # rows that are taken to be there, so that few do not drift apart
_BAR = 2.6  # inches, the scale of colours at its longest
_NAMED = 4  # trials named at the end of a row

Segment = tuple[tuple[float, float], tuple[float, float]]


def draw_stage_tree(book: Book) -> Figure:
    """Each node a line from the step where it begins to where the book's trials leave it; the best trial's way marked.

    Colour is the best value of the metric found on a line or below it, and, for dots, the value measured there; width
    is the number of trials that train as one. Of a tree with more than 140 rows, those lines are drawn that most trials
    go along, among equals the best; a tick shows where others part, and the legend tells how many.
    """
    lanes = book.lanes
    if not lanes:
        return style.nothing("No trial was asked for: there is no stage tree.")
    maximize = book.maximize
    found = book.measured
    best = book.trials[book.best] if book.best is not None else None
    way = [] if best is None else [(node.id, start, stop) for node, start, stop in best.legs(best.asked)]
    shown = lay_out.foremost(
        lanes,
        MOST_ROWS,
        lambda lane: merit(found[lane.node.id].value, maximize=maximize),
        always=[id for id, _, _ in way],
    )
    rows = lay_out.rows(shown)
    count = 1 + max(rows.values())
    height = min(style.TALLEST, max(_LOWEST, _AROUND + _ROW * count))
    pitch = 72 * (height - _AROUND) / max(_FEWEST, count)  # points from row to row
    figure, axes = style.figure(height)

    values = [value for lane in shown if (value := found[lane.node.id].value) is not None]
    if len(set(values)) == 1:
        values = [value for lane in shown for _, value in found[lane.node.id].points]
    scale, shades = _scale(values, maximize), style.shades(maximize)
    tints: dict[NodeId, style.Colour] = {}
    for lane in shown:
        value = found[lane.node.id].value
        tints[lane.node.id] = style.FAINT if value is None else shades(float(scale(value)))
    thin = min(1.2, max(0.5, 0.25 * pitch))
    most = math.log(max(2, *(lane.trials for lane in shown)))
    widths = {lane.node.id: thin * (1 + 1.4 * math.log(lane.trials) / most) for lane in shown}

    legend = []
    if way:
        points = [point for id, start, stop in way for point in ((start, rows[id]), (stop, rows[id]))]
        width = max(widths.values()) + 2.0
        axes.add_collection(LineCollection([points], colors=style.VERMILION, linewidths=width, zorder=1))
        name = trial_name(book, book.best) if book.best is not None else ""
        legend.append(Line2D([], [], color=style.VERMILION, linewidth=2.5, label=f"best: trial {name}"))
    _connect(axes, shown, rows, tints, {id: merit(at.value, maximize=maximize) for id, at in found.items()}, thin)
    lines: list[Segment] = [((lane.node.start, rows[lane.node.id]), (lane.reach, rows[lane.node.id])) for lane in shown]
    axes.add_collection(
        LineCollection(lines, colors=list(tints.values()), linewidths=list(widths.values()), zorder=3, capstyle="butt")
    )
    dots = [(step, rows[lane.node.id], value) for lane in shown for step, value in found[lane.node.id].points]
    if dots:
        x, y, colours = zip(*dots, strict=True)
        size = min(11.0, max(1.5, (0.6 * pitch) ** 2))
        axes.scatter(x, y, s=size, c=colours, norm=scale, cmap=shades, edgecolors="white", linewidths=0.25, zorder=4)
    hidden = len(lanes) - len(shown)
    if hidden:
        legend.append(_tick_off(axes, shown, rows, hidden))

    end = max(lane.reach for lane in shown)
    axes.set_xlim(-0.005 * end, 1.01 * end)
    middle, half = (count - 1) / 2, max(_FEWEST, count) / 2
    axes.set_ylim(middle + half + 0.2, middle - half - 0.2)
    axes.set_yticks([])
    axes.grid(axis="x", color=style.TRACK, linewidth=0.5)
    style.counts(axes.xaxis)
    style.label(axes, x="training step")
    trials, nodes = style.counted(len(book.trials), "trial"), style.counted(len(lanes), "node")
    style.title(axes, f"{trials} in {nodes}" + (" (the wider, the more trials)" if len(book.trials) > 1 else ""))
    style.legend(axes, legend)
    if pitch >= _LABELLED:
        _name_ends(axes, book, shown, rows)
    if values:
        _show_scale(figure, scale, shades, style.plain(book.metric, 24), _extend(values, scale, maximize))
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
    axes: Axes,
    shown: Sequence[Lane],
    rows: Mapping[NodeId, int],
    tints: Mapping[NodeId, style.Colour],
    merits: Mapping[NodeId, float],
    width: float,
) -> None:
    """From each lane up to its parent's; the best on top, where several lie on each other."""
    below = sorted((lane.node for lane in shown if lane.node.parent is not None), key=lambda node: merits[node.id])
    segments: list[Segment] = [
        ((node.start, rows[node.parent.id]), (node.start, rows[node.id])) for node in below if node.parent is not None
    ]
    colours = [tints[node.id] for node in below]
    axes.add_collection(LineCollection(segments, colors=colours, linewidths=0.6 * width, zorder=2))


def _tick_off(axes: Axes, shown: Sequence[Lane], rows: Mapping[NodeId, int], hidden: int) -> Line2D:
    """A tick where lanes part that are not drawn. Returns what the legend says of them."""
    places = {
        (child.node.start, rows[lane.node.id]) for lane in shown for child in lane.children if child.node.id not in rows
    }
    ticks: list[Segment] = [((step, row), (step, row + 0.42)) for step, row in sorted(places)]
    axes.add_collection(LineCollection(ticks, colors=style.GREY, linewidths=0.5, zorder=2))
    roots = "" if places else ", from the first step on"
    return Line2D(
        [], [], color=style.GREY, linestyle="", marker="|", label=f"{style.counted(hidden, 'node')} left out{roots}"
    )


def _name_ends(axes: Axes, book: Book, shown: Sequence[Lane], rows: Mapping[NodeId, int]) -> None:
    """The numbers of the trials that end on a line, beside its end; above it where another line goes on from there."""
    if book.study is None and len({book.account.study_of(id) for id in book.trials}) > 1:
        return  # numbers would not tell whose
    ends: dict[NodeId, list[str]] = {}
    for id, trial in book.trials.items():
        if trial.asked:
            ends.setdefault(trial.node_at(trial.asked).id, []).append(trial_name(book, id))
    goes_on = {(rows[lane.node.id], lane.node.start) for lane in shown}
    for lane in shown:
        names = ends.get(lane.node.id)
        if names:
            above = (rows[lane.node.id], lane.reach) in goes_on
            axes.annotate(
                _listed(names),
                (lane.reach, rows[lane.node.id]),
                xytext=(-2, 1.5) if above else (3, 0),
                textcoords="offset points",
                ha="right" if above else "left",
                va="bottom" if above else "center_baseline",
                fontsize=style.TINY,
                color=style.INK,
                parse_math=False,
                zorder=5,
            )


def trial_name(book: Book, trial: TrialId) -> str:
    number = book.number(trial)
    return style.plain(trial.rpartition("/")[2], 12) if number is None else str(number)


def _listed(names: Sequence[str]) -> str:
    ordered = sorted(names, key=lambda name: (len(name), name))
    shown = ", ".join(ordered[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} + {len(names) - _NAMED}"


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
