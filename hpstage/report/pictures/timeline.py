"""The worker timeline: what each worker did, when."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hpstage.report.names import plain
from hpstage.report.pictures import style
from hpstage.report.views.timeline import ACTIVITIES, EVALUATE, LOAD, PIECES, SAVE, TRAIN, WASTED, TimelineView
from hpstage.text import count_of

COLOURS = {
    TRAIN: style.BLUE,
    EVALUATE: style.ORANGE,
    LOAD: style.GREEN,
    SAVE: style.PURPLE,
    WASTED: style.INK,
}
# Every other stage of a worker is drawn in this, so that neighbours can be told apart without an outline, which would
# swallow the short ones.
_OTHER_TRAIN = "#3A95CC"

_ROW = 0.19  # inches per worker, as long as there is room
_AROUND = 0.75  # inches above and below the rows
_FEWEST = 3  # rows that are taken to be there, so that one is no block
_HALF = 0.38  # of a row, where rows are 1 apart
_LABELLED = 64  # workers; more are drawn without their names
_NAME = 30  # characters of a worker's name


@style.in_our_style
def draw(view: TimelineView | None) -> Figure:
    """See :func:`hpstage.report.draw_timeline`."""
    if view is None:
        return style.nothing("Nothing was trained: there is no timeline.")
    workers, span = view.workers, view.span
    height = min(style.TALLEST, _AROUND + _ROW * max(_FEWEST, len(workers)))
    pitch = 72 * (height - _AROUND) / max(_FEWEST, len(workers))  # points from row to row
    figure, axes = style.figure(height)
    unit, name = style.time_unit(span)
    end = span / unit
    if view.bars:
        rows = {worker: row for row, worker in enumerate(workers)}
        tracks = [
            _box(start / unit, (stop - start) / unit, row)
            for row, there in enumerate(view.there)
            for start, stop in there
        ]
        axes.add_collection(PolyCollection(tracks, facecolors=style.TRACK, edgecolors="none"))
        colours = [_colour(bar.activity, bar.stage % 2) for bar in view.bars]
        boxes = [_box(bar.began / unit, bar.seconds / unit, rows[bar.worker]) for bar in view.bars]
        axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="none"))
    else:
        _paint(axes, view, end)

    there = [sum(stop - start for start, stop in periods) for periods in view.there]
    share = min(1.0, sum(view.busy) / sum(there))
    # Of a search in several calls, each may have had workers of its own.
    busy = f"{share:.0%} of {end:,.3g} {name}"
    if min(there) < span:
        busy = f"{share:.0%} of their time"
    style.title(axes, f"{count_of(len(workers), 'worker')}, busy {busy}")
    axes.set_xlim(0.0, end)
    middle, half = (len(workers) - 1) / 2, max(_FEWEST, len(workers)) / 2
    axes.set_ylim(middle + half + 0.05, middle - half - 0.05)
    for at in view.pauses:
        axes.axvline(at / unit, color=style.INK, linewidth=0.7, linestyle=(0, (2, 2)))
    without = ", without the pauses between calls (dashed)" if view.pauses else ""
    style.label(axes, x=f"{name} since the first stage began{without}")
    if len(workers) <= _LABELLED:
        labels = [
            f"{plain(worker, _NAME)}  {min(1.0, seconds / its):4.0%}"
            for worker, seconds, its in zip(workers, view.busy, there, strict=True)
        ]
        axes.set_yticks(range(len(workers)), labels=labels, parse_math=False, fontsize=min(style.SMALL, 0.8 * pitch))
        axes.tick_params(axis="y", length=0)
    else:
        axes.set_yticks([])
        style.label(axes, y=f"{len(workers):,} workers")
    handles = [Patch(color=COLOURS[name], label=name) for name in ACTIVITIES if name in view.activities]
    style.legend(axes, [*handles, Patch(color=style.TRACK, label="idle")])
    return figure


def _box(began: float, seconds: float, row: int) -> list[tuple[float, float]]:
    left, right, top, bottom = began, began + seconds, row - _HALF, row + _HALF
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _colour(activity: str, odd: int) -> str:
    return _OTHER_TRAIN if odd and activity == TRAIN else COLOURS[activity]


def _paint(axes: Axes, view: TimelineView, end: float) -> None:
    """An image per worker, whose pixels mix the colours of what fell into them."""
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
