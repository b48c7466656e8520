"""The timeline of the activities of each worker."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hpstage.accounting.book import Book
from hpstage.accounting.pauses import Period, united
from hpstage.errors.text import count_of
from hpstage.plan.facts import ChainLost, StateReached, WorkerId
from hpstage.plan.messages import host_of
from hpstage.report.names import plain, worker_names, workers_in_order
from hpstage.report.pictures import style

TRAIN, EVALUATE, LOAD, SAVE, WASTED, FAILED = "train", "evaluate", "load", "save", "discarded", "failed"
ACTIVITIES = (TRAIN, EVALUATE, LOAD, SAVE, WASTED, FAILED)
"""``discarded``: training that was lost with its worker, or stopped. ``failed``: training in which the user's code
raised."""

MOST_BARS = 4000
"""Maximum number of bars drawn individually. If there are more, each worker's row is cut into ``PIECES`` pieces of
equal time, whose colour mixes the activities."""
PIECES = 1600

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

    there = [sum(stop - start for start, stop in periods) for periods in view.there]
    share = min(1.0, sum(view.busy) / sum(there))
    # Each call of a search may have had different workers.
    busy = f"{share:.0%} of {end:,.3g} {name}"
    if min(there) < span:
        busy = f"{share:.0%} of their time"
    # This is not the share of allocated time, which begins when workers start.
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
            f"{plain(names[worker], _NAME)}  {min(1.0, seconds / its):4.0%}"
            for worker, seconds, its in zip(workers, view.busy, there, strict=True)
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


class Bar(msgspec.Struct, frozen=True, gc=False):
    """An activity of a worker, from ``began`` for ``seconds``. ``stage`` counts the stages of the worker."""

    worker: WorkerId
    activity: str
    began: float
    seconds: float
    stage: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The timeline of a book. Times are seconds since the first stage began, on the workers' clock, without the pauses
    between calls; the last stage ended at ``span``."""

    workers: list[WorkerId]
    """The workers in the order in which they started."""
    busy: list[float]
    """The busy seconds of each worker."""
    there: list[list[Period]]
    """When each worker was present, as far as the journal shows: during the calls in which it did some work."""
    span: float
    pauses: list[float]
    """The times of pauses."""
    failures: list[tuple[WorkerId, float]]
    """Where and when the user's code raised."""
    activities: set[str]
    bars: list[Bar]
    """Empty if there are too many bars."""
    shares: list[dict[tuple[str, int], array[float]]]
    """If there are too many bars: for each worker, by activity and by even or odd stage, the share of each of the
    ``PIECES`` pieces. If a worker trains chains side by side, or workers of two clusters share a name, bars overlap and
    shares sum to more than 1."""


def bars(book: Book) -> Iterator[Bar]:
    """Yield the bars of a :class:`Book`: for each stage, one per activity and worker. Times are on the workers' clock.
    Activities that took no time have no bar."""
    stages: dict[WorkerId, int] = {}
    for at, charge in zip(book.began, book.charges, strict=True):
        fact = charge.fact
        team = book.team(fact)
        for worker in team:
            stages[worker] = stages.get(worker, 0) + 1
        for activity, seconds in _activities(fact):
            for worker in team:
                yield Bar(worker, activity, at, seconds, stages[worker])
            at += seconds
    for waste in book.wastes:
        lost = waste.fact
        if lost.seconds > 0:
            for worker in book.team(lost):
                yield Bar(worker, _end(lost), lost.began, lost.seconds / lost.workers, 0)


def _end(lost: ChainLost) -> str:
    return FAILED if lost.outcome == "failed" else WASTED


def failures(book: Book) -> Iterator[tuple[WorkerId, float]]:
    """Yield where and when the user's code raised, on the workers' clock."""
    for waste in book.wastes:
        if _end(waste.fact) == FAILED:
            yield host_of(waste.fact.worker), waste.fact.at
    evaluated = {(fact.node, fact.step) for fact in book.account.failures() if fact.evaluating}
    for charge in book.charges:
        if (charge.fact.node, charge.fact.step) in evaluated:
            yield host_of(charge.fact.worker), charge.fact.at


def _activities(fact: StateReached) -> list[tuple[str, float]]:
    """Return the activities of a report that took time, in order, with their wall-clock seconds."""
    share = max(1.0, fact.workers)
    took = (
        (LOAD, fact.load_seconds / share),
        (TRAIN, fact.train_seconds / fact.workers),
        (EVALUATE, fact.evaluate_seconds / share),
        (SAVE, fact.save_seconds / share),
    )
    return [(activity, seconds) for activity, seconds in took if seconds > 0]


def timeline_of(book: Book) -> Timeline | None:
    """Return the timeline of a book, ``None`` if nothing was trained."""
    its = {worker: worked for worker, worked in book.workers.items() if worked.seconds > 0}
    if not its:
        return None
    workers = sorted(its, key=lambda worker: its[worker].first)
    first = min(worked.first for worked in its.values())
    elapsed = partial(book.pauses.elapsed, first)
    span = elapsed(max(worked.last for worked in its.values()))
    drawn = list(islice(bars(book), MOST_BARS + 1))
    few = len(drawn) <= MOST_BARS
    shares = [] if few else _shares(book, workers, elapsed, span)
    found = {bar.activity for bar in drawn} if few else {activity for row in shares for activity, _ in row}
    return Timeline(
        workers=workers,
        busy=[its[worker].seconds for worker in workers],
        there=[
            united((elapsed(start), min(span, elapsed(stop))) for start, stop in book.presence[worker])
            for worker in workers
        ],
        span=span,
        pauses=[elapsed(start) for start, _ in book.pauses.gaps if start > first],
        failures=[(worker, elapsed(at)) for worker, at in failures(book) if worker in its],
        activities=found,
        bars=[msgspec.structs.replace(bar, began=elapsed(bar.began)) for bar in drawn] if few else [],
        shares=shares,
    )


def _shares(
    book: Book, workers: list[WorkerId], elapsed: Callable[[float], float], span: float
) -> list[dict[tuple[str, int], array[float]]]:
    """Return the shares of each worker's pieces. O(bars + workers x pieces)."""
    found: list[dict[tuple[str, int], array[float]]] = [{} for _ in workers]
    rows = dict(zip(workers, found, strict=True))
    scale = PIECES / span
    nothing = bytes(8 * PIECES)
    for bar in bars(book):
        row, kind = rows[bar.worker], (bar.activity, bar.stage % 2)
        shares = row.get(kind)
        if shares is None:
            shares = row[kind] = array("d", nothing)
        start = elapsed(bar.began) * scale
        stop = min(start + bar.seconds * scale, PIECES)
        begin, end = int(start), int(stop)
        if begin == end:
            if end < PIECES:  # otherwise the bar is too short to be seen at the end
                shares[begin] += stop - start
            continue
        shares[begin] += begin + 1 - start
        for piece in range(begin + 1, end):
            shares[piece] += 1.0
        if end < PIECES:
            shares[end] += stop - end
    return found
