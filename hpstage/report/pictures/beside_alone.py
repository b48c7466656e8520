"""The stage tree next to the same trials without sharing, to show what the tree saves."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from hpstage.accounting.book import Book
from hpstage.errors.text import count_of
from hpstage.report.pictures import style
from hpstage.report.pictures.stage_tree import colour_of, draw_tree, legend_of
from hpstage.report.tree.labels import write
from hpstage.report.tree.layout import Layout, lay_out

_HEIGHT = 3.6  # inches
_ABOVE, _BELOW, _LEFT, _RIGHT, _BETWEEN = 0.3, 0.45, 0.08, 0.05, 0.25  # inches around the panels
_ROWS = 26  # maximum number of rows of the tree
_TRIES = 8
_FEWEST = 4  # rows laid out at least, so that few rows stay close together


@style.in_our_style
def draw_beside_alone(book: Book) -> Figure:
    """Draw each trial of a book as a line of its own and, next to them over the same steps, their stage tree.

    Colour ranks the best metric of a trial, or of a branch of the tree and its descendants. The number of steps is the
    total length of all lines, including steps that other studies have trained.
    """
    if not book.branches:
        return style.nothing("No trial was requested: there is nothing to compare.")
    layout = lay_out(book)
    shown = layout.fitted(_ROWS)
    figure = style.blank(_HEIGHT, layout=None)
    last = max(branch.reach for branch in book.branches.values())
    width = style.WIDTH - _LEFT - _BETWEEN - _RIGHT
    tree, most = width / 2, width  # wider by the texts next to its lines: a step has the same length in both panels
    for _ in range(_TRIES):
        middle = (tree + most) / 2
        fits = middle * (1 + last / write(layout, shown, 72 * middle, style.TINY).end) <= width
        tree, most = (middle, most) if fits else (tree, middle)
    height = _HEIGHT - _ABOVE - _BELOW
    left, right = (
        figure.add_axes((x / style.WIDTH, _BELOW / _HEIGHT, wide / style.WIDTH, height / _HEIGHT))
        for x, wide in ((_LEFT, width - tree), (_LEFT + width - tree + _BETWEEN, tree))
    )
    draw_tree(right, layout, shown, points=72 * tree, pitch=72 * height / max(_FEWEST, shown.count))
    right.set_ylim(max(_FEWEST, shown.count) - 0.5, -0.7)
    style.legend(right, legend_of(layout, shown))
    _draw_unshared(left, layout)
    left.set_xlim(0.0, max(last, (width - tree) * right.get_xlim()[1] / tree))
    left.set_xticks(right.get_xticks())
    left.spines["bottom"].set_bounds(*right.spines["bottom"].get_bounds())
    saved = book.savings
    for axes, text in (
        (left, f"{count_of(saved.trials, 'trial')} without sharing: {count_of(saved.steps_asked, 'step')}"),
        (right, f"As a stage tree: {count_of(saved.steps_unique, 'step')}"),
    ):
        axes.set_title(text, loc="left", fontsize=style.TITLE, color=style.INK, parse_math=False)
    return figure


def _draw_unshared(axes: Axes, layout: Layout) -> None:
    """Draw a line for each trial: the most steps first, then the best."""
    style.tidy(axes)
    trials = layout.book.trials
    ranks = {id: layout.branches[leaf].rank for id, leaf in layout.leaves.items()}
    order = sorted(ranks, key=lambda id: (trials[id].requested, ranks[id] or 0.0), reverse=True)
    pitch = 72 * (_HEIGHT - _ABOVE - _BELOW) / max(1, len(order))
    axes.add_collection(
        LineCollection(
            [((0, row), (trials[id].requested, row)) for row, id in enumerate(order)],
            colors=[colour_of(ranks[id]) for id in order],
            linewidths=min(2.0, 0.6 * pitch),
            capstyle="butt",
        )
    )
    axes.set_ylim(max(_FEWEST, len(order)) - 0.5, -0.7)
    axes.set_yticks([])
    axes.grid(axis="x", color=style.TRACK, linewidth=0.5)
    style.label(axes, x="training step")
