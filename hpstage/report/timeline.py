"""The worker timeline: what each worker did, when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hpstage.events import WorkerId
from hpstage.report import style
from hpstage.report.account import began
from hpstage.report.book import Book

TRAIN, EVALUATE, LOAD, SAVE, WASTED = "train", "evaluate", "load", "save", "thrown away"

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

MOST_BARS = 4000
"""Bars drawn one by one. Of more, a worker's row is an image, whose pixels mix the colours of what fell into them."""
_PIXELS = 1600  # of such an image

_ROW = 0.19  # inches per worker, as long as there is room
_AROUND = 0.75  # inches above and below the rows
_FEWEST = 3  # rows that are taken to be there, so that one is no block
_HALF = 0.38  # of a row, where rows are 1 apart
_LABELLED = 64  # workers; more are drawn without their names
_NAME = 30  # characters of a worker's name

_Floats = npt.NDArray[np.float64]


class Bar(msgspec.Struct, frozen=True, gc=False):
    """A worker did ``activity`` from ``began`` on for ``seconds``. ``stage`` counts the worker's reports."""

    worker: WorkerId
    activity: str
    began: float
    seconds: float
    stage: int


def bars(book: Book) -> Iterator[Bar]:
    """What workers did for the book's trials, on their clock. What took no time has no bar."""
    stages: dict[WorkerId, int] = {}
    for charge in book.charges:
        fact = charge.fact
        stage = stages[fact.worker] = stages.get(fact.worker, 0) + 1
        at = began(fact)
        # In the order in which they are done; ``fact.at`` is the end of the last.
        for activity, seconds in (
            (LOAD, fact.load_seconds),
            (TRAIN, fact.train_seconds),
            (EVALUATE, fact.evaluate_seconds),
            (SAVE, fact.save_seconds),
        ):
            if seconds > 0:
                yield Bar(fact.worker, activity, at, seconds, stage)
            at += seconds
    for waste in book.wastes:
        lost = waste.fact
        if lost.seconds > 0:
            yield Bar(lost.worker, WASTED, lost.at - lost.seconds, lost.seconds, 0)


def draw_timeline(book: Book) -> Figure:
    """One row per worker, in the order in which they began; x in time since the first began.

    Beside a worker's name stands its share of busy time, from the first stage of all to the last.
    """
    drawn = list(bars(book))
    if not drawn:
        return style.nothing("Nothing was trained: there is no timeline.")
    first = min(bar.began for bar in drawn)
    span = max(bar.began + bar.seconds for bar in drawn) - first
    busy: dict[WorkerId, float] = {}
    since: dict[WorkerId, float] = {}
    for bar in drawn:
        busy[bar.worker] = busy.get(bar.worker, 0.0) + bar.seconds
        since[bar.worker] = min(bar.began, since.get(bar.worker, bar.began))
    workers = sorted(busy, key=lambda worker: since[worker])
    rows = {worker: row for row, worker in enumerate(workers)}
    height = min(style.TALLEST, _AROUND + _ROW * max(_FEWEST, len(workers)))
    pitch = 72 * (height - _AROUND) / max(_FEWEST, len(workers))  # points from row to row
    figure, axes = style.figure(height)
    unit, name = style.time_unit(span)
    end = span / unit
    if len(drawn) <= MOST_BARS:
        tracks = [_box(0.0, end, row) for row in rows.values()]
        axes.add_collection(PolyCollection(tracks, facecolors=style.TRACK, edgecolors="none"))
        colours = [_OTHER_TRAIN if bar.activity == TRAIN and bar.stage % 2 else COLOURS[bar.activity] for bar in drawn]
        boxes = [_box((bar.began - first) / unit, bar.seconds / unit, rows[bar.worker]) for bar in drawn]
        axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="none"))
    else:
        _paint(axes, drawn, rows, first, span, end)

    share = sum(busy.values()) / (span * len(workers))
    style.title(axes, f"{style.counted(len(workers), 'worker')}, busy {min(1.0, share):.0%} of {end:,.3g} {name}")
    axes.set_xlim(0.0, end)
    middle, half = (len(workers) - 1) / 2, max(_FEWEST, len(workers)) / 2
    axes.set_ylim(middle + half + 0.05, middle - half - 0.05)
    style.label(axes, x=f"{name} since the first stage began")
    if len(workers) <= _LABELLED:
        labels = [f"{style.plain(worker, _NAME)}  {min(1.0, busy[worker] / span):4.0%}" for worker in workers]
        axes.set_yticks(range(len(workers)), labels=labels, parse_math=False, fontsize=min(style.SMALL, 0.8 * pitch))
        axes.tick_params(axis="y", length=0)
    else:
        axes.set_yticks([])
        style.label(axes, y=f"{len(workers):,} workers")
    seen = {bar.activity for bar in drawn}
    handles = [Patch(color=colour, label=activity) for activity, colour in COLOURS.items() if activity in seen]
    style.legend(axes, [*handles, Patch(color=style.TRACK, label="idle")])
    return figure


def _box(began: float, seconds: float, row: int) -> list[tuple[float, float]]:
    left, right, top, bottom = began, began + seconds, row - _HALF, row + _HALF
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _paint(axes: Axes, drawn: list[Bar], rows: dict[WorkerId, int], first: float, span: float, end: float) -> None:
    """The bars as an image per worker: O(bars log bars), however short they are."""
    kinds = [(activity, colour, odd) for activity, colour in COLOURS.items() for odd in (0, 1)]
    index = {(activity, odd): i for i, (activity, _, odd) in enumerate(kinds)}
    paints = np.array([to_rgb(_OTHER_TRAIN if (a, odd) == (TRAIN, 1) else colour) for a, colour, odd in kinds])
    track = np.array(to_rgb(style.TRACK))
    row = np.array([rows[bar.worker] for bar in drawn])
    kind = np.array([index[bar.activity, bar.stage % 2] for bar in drawn])
    start = np.array([bar.began for bar in drawn]) - first
    stop = start + np.array([bar.seconds for bar in drawn])
    edges = np.linspace(0.0, span, _PIXELS + 1)
    group = row * len(kinds) + kind
    order = np.argsort(group, kind="stable")
    bounds = np.searchsorted(group[order], np.arange(len(rows) * len(kinds) + 1))
    for at in range(len(rows)):
        image: Any = np.zeros((_PIXELS, 3))
        filled = np.zeros(_PIXELS)
        for i, paint in enumerate(paints):
            mine = order[bounds[at * len(kinds) + i] : bounds[at * len(kinds) + i + 1]]
            if len(mine):
                share = np.diff(_before(edges, start[mine]) - _before(edges, stop[mine])) * (_PIXELS / span)
                filled += share
                image += share[:, None] * paint
        image += np.clip(1.0 - filled, 0.0, None)[:, None] * track
        # Bars overlap where workers of two clusters have one name.
        image /= np.maximum(filled, 1.0)[:, None]
        extent = (0.0, end, at + _HALF, at - _HALF)
        axes.imshow(np.clip(image, 0.0, 1.0)[None], extent=extent, aspect="auto", interpolation="nearest")


def _before(edges: _Floats, moments: _Floats) -> _Floats:
    """For each edge, the time that has passed since each of the moments before it, summed."""
    ordered = np.sort(moments)
    count = np.searchsorted(ordered, edges)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    return np.asarray(count * edges - sums[count], dtype=np.float64)
