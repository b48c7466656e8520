"""The stage tree for print, in the layout and colours of the interactive one."""

from __future__ import annotations

import math
from collections.abc import Mapping

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hpstage.accounting.book import Book
from hpstage.errors.text import count_of
from hpstage.report.names import plain, trial_name
from hpstage.report.pictures import style
from hpstage.report.tree.colours import BEST, FAILED, SHADES, UNMEASURED
from hpstage.report.tree.labels import write
from hpstage.report.tree.layout import ROWS, Layout, Placed, lay_out

PALETTE = ListedColormap(colormaps["viridis"].colors[SHADES])  # type: ignore[attr-defined]

_ROW = 0.16  # inches, as long as there is room
_LOWEST = 2.0  # inches: room for the colour bar and what is written next to it
_FEWEST = 4  # rows laid out at least, so that few rows stay close together
_ABOVE, _BELOW, _LEFT, _RIGHT = 0.3, 0.45, 0.08, 1.2  # inches around the rows; the colour bar is on the right
_BAR = 2.4  # inches, length of the colour bar at most
_ALPHA = 0.5  # of the band

Segment = tuple[tuple[float, float], tuple[float, float]]


@style.in_our_style
def draw_stage_tree(book: Book) -> Figure:
    """Draw each node as a line from its start to where the book's trials leave it, the best trial's path as a band.

    Labels show the hyperparameters that change at branch points. Colour ranks the best metric on a branch or below it;
    width is the number of trials that share the training. If the tree has more rows than a page, only the branches with
    the most trials are drawn, the best among equals; the others are counted at their parents.
    """
    if not book.branches:
        return style.nothing("No trial was requested: there is no stage tree.")
    layout = lay_out(book)
    shown = layout.fitted(ROWS)
    count = max(_FEWEST, shown.count)
    height = min(style.TALLEST, max(_LOWEST, _ABOVE + _BELOW + _ROW * count))
    figure = style.blank(height, layout=None)
    width = style.WIDTH - _LEFT - _RIGHT
    axes = figure.add_axes((_LEFT / style.WIDTH, _BELOW / height, width / style.WIDTH, 1 - (_ABOVE + _BELOW) / height))
    draw_tree(axes, layout, shown, points=72 * width, pitch=72 * (height - _ABOVE - _BELOW) / count)
    middle = (shown.count - 1) / 2
    axes.set_ylim(middle + count / 2, middle - count / 2)
    trials, nodes = count_of(len(book.trials), "trial"), count_of(len(layout.branches), "node")
    style.title(axes, f"{trials} in {nodes}" + (" (wider: more trials)" if len(book.trials) > 1 else ""))
    style.legend(axes, legend_of(layout, shown))
    if layout.scale:
        length = min(_BAR, height - _ABOVE - _BELOW)
        place = (1 - (_RIGHT - 0.15) / style.WIDTH, 1 - (_ABOVE + length) / height, 0.1 / style.WIDTH, length / height)
        draw_scale(figure.add_axes(place), layout)
    return figure


def draw_tree(axes: Axes, layout: Layout, shown: Placed, *, points: float, pitch: float) -> None:
    """Draw the branches of ``shown`` on axes that are ``points`` wide, with rows that are ``pitch`` points high."""
    style.tidy(axes)
    rows, branches = shown.rows, layout.branches
    most = math.log(max(2, *(branches[i].branch.trials for i in rows)))
    thin = min(0.9, 0.12 * pitch)
    widths = {i: thin * (1 + 2.8 * math.log(branches[i].branch.trials) / most) for i in rows}
    if path := layout.path(shown):
        x, y = zip(*path, strict=True)
        width = max(widths.values()) + 2.5
        axes.plot(x, y, color=BEST, alpha=_ALPHA, linewidth=width, solid_capstyle="butt", zorder=1)
    joins = layout.joins(shown)
    ups: list[Segment] = [((step, top), (step, bottom)) for step, top, bottom, _ in joins]
    tints = [colour_of(rank) for *_, rank in joins]
    axes.add_collection(LineCollection(ups, colors=tints, linewidths=0.6 * thin, zorder=2))
    lines: list[Segment] = [
        ((branches[i].branch.node.start, row), (branches[i].branch.reach, row)) for i, row in rows.items()
    ]
    colours = [colour_of(branches[i].rank) for i in rows]
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=[*widths.values()], zorder=3, capstyle="butt"))
    if failed := layout.failed(shown):
        steps, places = zip(*failed, strict=True)
        axes.scatter(steps, places, marker="x", s=min(30.0, 0.35 * pitch**2), linewidths=1.2, color=FAILED, zorder=4)
    axes.set_yticks([])
    axes.grid(axis="x", color=style.TRACK, linewidth=0.5)
    style.counts(axes.xaxis)
    style.label(axes, x="training step")
    _write(axes, layout, shown, widths, points, min(style.TINY, 0.6 * pitch))


def colour_of(rank: float | None) -> style.Colour:
    return UNMEASURED if rank is None else PALETTE(rank)


def legend_of(layout: Layout, shown: Placed) -> list[Line2D]:
    found, book = [], layout.book
    if book.best is not None:
        label = f"best: trial {trial_name(book, book.best)}"
        found.append(Line2D([], [], color=BEST, alpha=_ALPHA, linewidth=5, label=label))
    if layout.failed(shown):
        found.append(Line2D([], [], color=FAILED, linestyle="", marker="x", markersize=4, label="failed"))
    return found


def _write(axes: Axes, layout: Layout, shown: Placed, widths: Mapping[int, float], points: float, size: float) -> None:
    written = write(layout, shown, points, size)
    last = max(laid.branch.reach for laid in layout.branches)
    axes.set_xlim(0.0, written.end)
    axes.set_xticks([at for at in axes.xaxis.get_major_locator().tick_values(0, last) if 0 <= at <= last])
    axes.spines["bottom"].set_bounds(0, last)
    for note in written.notes:
        axes.annotate(
            note.text,
            (note.step, note.row),
            xytext=(note.right, 0 if note.above is None else widths[note.above] / 2 + 0.8),
            textcoords="offset points",
            va="center_baseline" if note.above is None else "baseline",
            fontsize=size,
            color=style.INK,
            parse_math=False,
            zorder=5,
            annotation_clip=False,
        )


def draw_scale(axes: Axes, layout: Layout) -> None:
    """Draw the colour bar of ranks, labelled with the metric's values at these ranks."""
    ticks = layout.ticks()
    bar = axes.figure.colorbar(ScalarMappable(Normalize(0, 1), PALETTE), cax=axes)
    bar.set_ticks([*ticks], labels=[f"{value:.4g}" for value in ticks.values()], parse_math=False)
    bar.set_label(
        f"{plain(layout.book.metric, 24)}\nbest at or below, by rank",
        fontsize=style.SMALL,
        color=style.INK,
        parse_math=False,
    )
    axes.tick_params(labelsize=style.SMALL, labelcolor=style.INK, width=0.6, length=3)
    bar.outline.set_visible(False)
