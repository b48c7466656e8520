"""The stage tree: where trials share training, where they fork, and their results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hpstage.plan.facts import NodeId
from hpstage.report import lanes as lay_out
from hpstage.report.book import Book
from hpstage.report.lanes import Lane
from hpstage.report.measured import merit
from hpstage.report.names import plain, trial_name
from hpstage.report.pictures import style
from hpstage.text import count_of

MOST_ROWS = 140
"""Number of rows drawn: more cannot be distinguished on a page."""
_MOST_NAMED = 89  # number of rows above which there is no room for the numbers of trials
_NAMED = 4  # number of trials named at the end of a line

_ROW = 0.15  # inches per row, as long as there is room
_AROUND = 0.9  # inches above and below the rows
_LOWEST = 2.0  # inches: leaves room for the label of the colour bar and its ticks
_FEWEST = 4  # minimum number of rows laid out, so that few rows stay close together
_BAR = 2.6  # inches, maximum length of the colour bar

Segment = tuple[tuple[float, float], tuple[float, float]]


@style.in_our_style
def draw_stage_tree(book: Book) -> Figure:
    """Draw each node as a line from its start to where the book's trials leave it, with the best trial's path marked.

    Colour is the best metric value on a line or below it, and, for dots, the value measured there. Width is the number
    of trials that share the training. If the tree has more than 140 rows, the lines with the most trials are drawn, and
    the best among equals; a tick marks where others fork, and the legend gives their number.
    """
    lanes, maximize = book.lanes, book.maximize
    if not lanes:
        return style.nothing("No trial was asked for: there is no stage tree.")
    best = None if book.best is None else book.trials[book.best]
    way = [] if best is None else list(best.path_to(best.asked))
    shown = lay_out.foremost(lanes, book.ranking, MOST_ROWS, always=[node.id for node, _, _ in way])
    rows = lay_out.rows(shown)
    its = {lane.node.id: book.measured[lane.node.id] for lane in shown}
    count = 1 + max(rows.values())
    height = min(style.TALLEST, max(_LOWEST, _AROUND + _ROW * count))
    pitch = 72 * (height - _AROUND) / max(_FEWEST, count)  # points from row to row
    figure, axes = style.figure(height)

    values = [own.value for own in its.values() if own.value is not None]
    if len(set(values)) == 1:
        values = [value for own in its.values() for _, value in own.points]
    scale, shades = _scale(values, maximize), style.shades(maximize)
    tints: dict[NodeId, style.Colour] = {
        id: style.FAINT if own.value is None else shades(float(scale(own.value))) for id, own in its.items()
    }
    thin = min(1.2, max(0.5, 0.25 * pitch))
    most = math.log(max(2, *(lane.trials for lane in shown)))
    widths = [thin * (1 + 1.4 * math.log(lane.trials) / most) for lane in shown]

    legend = []
    if best is not None and way:
        points = [(step, rows[node.id]) for node, start, stop in way for step in (start, stop)]
        axes.add_collection(LineCollection([points], colors=style.VERMILION, linewidths=max(widths) + 2.0, zorder=1))
        name = f"best: trial {trial_name(book, best.id)}"
        legend.append(Line2D([], [], color=style.VERMILION, linewidth=2.5, label=name))
    # The connectors from each line up to its parent's, the best on top where several overlap.
    ranked = sorted(shown, key=lambda lane: merit(its[lane.node.id].value, maximize=maximize))
    joins = [(lane.node, lane.node.parent) for lane in ranked if lane.node.parent is not None]
    ups: list[Segment] = [((node.start, rows[above.id]), (node.start, rows[node.id])) for node, above in joins]
    colours = [tints[node.id] for node, _ in joins]
    axes.add_collection(LineCollection(ups, colors=colours, linewidths=0.6 * thin, zorder=2))
    lines: list[Segment] = [((lane.node.start, rows[lane.node.id]), (lane.reach, rows[lane.node.id])) for lane in shown]
    axes.add_collection(
        LineCollection(lines, colors=list(tints.values()), linewidths=widths, zorder=3, capstyle="butt")
    )
    dots = [(step, rows[id], value) for id, own in its.items() for step, value in own.points]
    if dots:
        x, y, found = zip(*dots, strict=True)
        size = min(11.0, max(1.5, (0.6 * pitch) ** 2))
        axes.scatter(x, y, s=size, c=found, norm=scale, cmap=shades, edgecolors="white", linewidths=0.25, zorder=4)
    if len(lanes) > len(shown):
        legend.append(_tick_off(axes, shown, rows, len(lanes) - len(shown)))

    end = max(lane.reach for lane in shown)
    axes.set_xlim(-0.005 * end, 1.01 * end)
    middle, half = (count - 1) / 2, max(_FEWEST, count) / 2
    axes.set_ylim(middle + half + 0.2, middle - half - 0.2)
    axes.set_yticks([])
    axes.grid(axis="x", color=style.TRACK, linewidth=0.5)
    style.counts(axes.xaxis)
    style.label(axes, x="training step")
    trials, nodes = count_of(len(book.trials), "trial"), count_of(len(lanes), "node")
    style.title(axes, f"{trials} in {nodes}" + (" (the wider, the more trials)" if len(book.trials) > 1 else ""))
    style.legend(axes, legend)
    if count <= _MOST_NAMED:
        _name_ends(axes, shown, rows, _ends(book, shown))
    if values:
        _show_scale(figure, scale, shades, plain(book.metric, 24), _extend(values, scale, maximize))
    return figure


def _show_scale(figure: Figure, scale: Normalize, shades: Colormap, metric: str, extend: str) -> None:
    """Add the colour bar beside the picture."""
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


def _tick_off(axes: Axes, shown: Sequence[Lane], rows: Mapping[NodeId, int], hidden: int) -> Line2D:
    """Draw a tick where lines that are not drawn fork off and return their legend entry."""
    places = {
        (child.node.start, rows[lane.node.id]) for lane in shown for child in lane.children if child.node.id not in rows
    }
    ticks: list[Segment] = [((step, row), (step, row + 0.42)) for step, row in sorted(places)]
    axes.add_collection(LineCollection(ticks, colors=style.GREY, linewidths=0.5, zorder=2))
    roots = "" if places else ", from the first step on"
    return Line2D(
        [], [], color=style.GREY, linestyle="", marker="|", label=f"{count_of(hidden, 'node')} left out{roots}"
    )


def _name_ends(axes: Axes, shown: Sequence[Lane], rows: Mapping[NodeId, int], ends: Mapping[NodeId, str]) -> None:
    """Write the trials that end on a line beside its end, or above it where another line continues from there."""
    goes_on = {(rows[lane.node.id], lane.node.start) for lane in shown}
    for lane in shown:
        if lane.node.id in ends:
            place = rows[lane.node.id], lane.reach
            above = place in goes_on
            axes.annotate(
                ends[lane.node.id],
                place[::-1],
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
    """Return a scale from the value that one line in ten is worse than, to the best, to ignore diverged values."""
    ranked = sorted(values, reverse=not maximize)
    if not ranked:
        return Normalize(0.0, 1.0)
    worst, best = ranked[len(ranked) // 10], ranked[-1]
    low, high = min(worst, best), max(worst, best)
    if low == high:
        low, high = low - 0.5, high + 0.5
    return Normalize(low, high, clip=True)


def _extend(values: Sequence[float], scale: Normalize, maximize: bool) -> str:
    """Return the end of the colour bar to extend: at most one line in ten is worse than the scale, none is better."""
    low, high = float(scale.vmin or 0.0), float(scale.vmax or 0.0)
    if maximize:
        return "min" if min(values) < low else "neither"
    return "max" if max(values) > high else "neither"


def _ends(book: Book, shown: Sequence[Lane]) -> dict[NodeId, str]:
    """Return the names of the trials that end on each lane, if any."""
    if book.study is None and len({book.account.plan.study_of(id) for id in book.trials}) > 1:
        return {}  # numbers would be ambiguous
    found: dict[NodeId, list[str]] = {lane.node.id: [] for lane in shown}
    for id, trial in book.trials.items():
        if trial.asked and (names := found.get(trial.node_at(trial.asked).id)) is not None:
            names.append(trial_name(book, id))
    return {id: _listed(names) for id, names in found.items() if names}


def _listed(names: Sequence[str]) -> str:
    ordered = sorted(names, key=lambda name: (len(name), name))
    shown = ", ".join(ordered[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} + {len(names) - _NAMED}"
