"""The timeline of the activities of each worker."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hpstage.accounting.book import Book
from hpstage.accounting.timeline import (
    ACTIVITIES,
    EVALUATE,
    FAILED,
    LOAD,
    PIECES,
    SAVE,
    TRAIN,
    WASTED,
    Timeline,
    timeline_of,
)
from hpstage.errors.text import count_of
from hpstage.report.names import plain, worker_names, workers_in_order
from hpstage.report.pictures import style

COLOURS = {
    TRAIN: style.BLUE,
    EVALUATE: style.ORANGE,
    LOAD: style.GREEN,
    SAVE: style.PURPLE,
    WASTED: style.INK,
    FAILED: style.VERMILION,
}
# The colour of every second training stage of a worker, to distinguish neighbours: an outline would hide short stages.
_OTHER_TRAIN = "#3A95CC"

_FEW = 100  # number of failures above which their marks are small
_RAISED: dict[str, Any] = {"marker": "X", "edgecolors": "white", "linewidths": 0.5, "zorder": 3}

_ROW = 0.19  # inches per worker, as long as there is room
_AROUND = 1.15  # inches above and below the rows
_FEWEST = 3  # minimum number of rows laid out, so that a single row is not a block
_HALF = 0.38  # of a row, where rows are 1 apart
_LABELLED = 64  # number of workers above which their names are omitted
_NAME = 30  # maximum number of characters of a worker's name


@style.in_our_style
def draw_timeline(book: Book) -> Figure:
    """Draw one row per worker, in the order in which workers started. The x axis is the time since the first start.

    Each worker's name is followed by its share of busy time, from the first to the last stage of the calls in which it
    worked. Pauses between calls are omitted.
    """
    view = timeline_of(book)
    if view is None:
        return style.nothing("Nothing was trained: there is no timeline.")
    workers, span = view.workers, view.span
    height = min(style.TALLEST, _AROUND + _ROW * max(_FEWEST, len(workers)))
    pitch = 72 * (height - _AROUND) / max(_FEWEST, len(workers))  # points from row to row
    figure, axes = style.figure(height)
    unit, name = style.time_unit(span)
    end = span / unit
    rows = {worker: row for row, worker in enumerate(workers)}
    if view.bars:
        tracks = [
            _box(start / unit, (stop - start) / unit, row)
            for row, there in enumerate(view.there)
            for start, stop in there
        ]
        axes.add_collection(PolyCollection(tracks, facecolors=style.TRACK, edgecolors="none"))
        colours = [_colour(bar.activity, bar.stage % 2) for bar in view.bars]
        boxes = [_box(bar.began / unit, bar.seconds / unit, rows[bar.worker]) for bar in view.bars]
        many = len(boxes) > style.MOST_SHAPES
        axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="none", rasterized=many))
    else:
        _paint(axes, view, end)
    if view.failures:
        x, y = zip(*[(at / unit, rows[worker]) for worker, at in view.failures], strict=True)
        size = 26 if len(x) <= _FEW else 6
        axes.scatter(x, y, s=size, c=COLOURS[FAILED], clip_on=False, rasterized=len(x) > style.MOST_SHAPES, **_RAISED)

    # Each call of a search may have had different workers.
    busy = f"{view.busy_share:.0%} of " + (f"{end:,.3g} {name}" if view.is_constant else "their time")
    style.title(axes, f"{count_of(len(workers), 'worker')}, busy {busy}, first stage to last")
    axes.set_xlim(0.0, end)
    middle, half = (len(workers) - 1) / 2, max(_FEWEST, len(workers)) / 2
    axes.set_ylim(middle + half + 0.05, middle - half - 0.05)
    for at in view.pauses:
        axes.axvline(at / unit, color=style.INK, linewidth=0.7, linestyle=(0, (2, 2)))
    without = ", without pauses (dashed)" if view.pauses else ""
    style.label(axes, x=f"{name} since the first stage began{without}")
    if len(workers) <= _LABELLED:
        names = worker_names([*workers_in_order(book.account), *workers])
        labels = [
            f"{plain(names[worker], _NAME)}  {share:4.0%}"
            for worker, share in zip(workers, view.busy_shares, strict=True)
        ]
        axes.set_yticks(range(len(workers)), labels=labels, parse_math=False, fontsize=min(style.SMALL, 0.8 * pitch))
        axes.tick_params(axis="y", length=0)
    else:
        axes.set_yticks([])
        style.label(axes, y=f"{len(workers):,} workers")
    handles: list[Patch | Line2D] = [
        Patch(color=COLOURS[name], label=name) for name in ACTIVITIES if name in view.activities
    ]
    handles.append(Patch(color=style.TRACK, label="idle"))
    if view.failures:
        handles.append(
            Line2D([], [], linestyle="", marker="X", markersize=5, color=COLOURS[FAILED], label="your code raised")
        )
    style.legend(axes, handles)
    return figure


def _box(began: float, seconds: float, row: int) -> list[tuple[float, float]]:
    left, right, top, bottom = began, began + seconds, row - _HALF, row + _HALF
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _colour(activity: str, odd: int) -> str:
    return _OTHER_TRAIN if odd and activity == TRAIN else COLOURS[activity]


def _paint(axes: Axes, view: Timeline, end: float) -> None:
    """Draw an image per worker. Each pixel mixes the colours of the activities in its time."""
    track = np.array(to_rgb(style.TRACK))
    middles = (np.arange(PIECES) + 0.5) * (view.span / PIECES)
    for row, (shares, periods) in enumerate(zip(view.shares, view.there, strict=True)):
        there = np.zeros(PIECES, dtype=bool)
        for start, stop in periods:
            there |= (start <= middles) & (middles <= stop)
        image: Any = np.zeros((PIECES, 3))
        filled = np.zeros(PIECES)
        for activity in ACTIVITIES:
            for odd in (0, 1):
                if (activity, odd) in shares:
                    share = np.array(shares[activity, odd])
                    filled += share
                    image += share[:, None] * np.array(to_rgb(_colour(activity, odd)))
        image += np.clip(1.0 - filled, 0.0, None)[:, None] * np.where(there[:, None], track, 1.0)
        image /= np.maximum(filled, 1.0)[:, None]
        extent = (0.0, end, row + _HALF, row - _HALF)
        axes.imshow(np.clip(image, 0.0, 1.0)[None], extent=extent, aspect="auto", interpolation="nearest")
