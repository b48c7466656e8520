"""What the worker timeline shows: what each worker did, when."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from hpstage.events import WorkerId
from hpstage.report.account import began
from hpstage.report.book import Book

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Floats: TypeAlias = npt.NDArray[np.float64]

TRAIN, EVALUATE, LOAD, SAVE, WASTED = "train", "evaluate", "load", "save", "thrown away"
ACTIVITIES = (TRAIN, EVALUATE, LOAD, SAVE, WASTED)

MOST_BARS = 4000
"""Bars that are shown one by one. Of more, a worker's row is cut into pieces of equal time, and of each piece is told
how much of it went into what."""
PIECES = 1600


class Bar(msgspec.Struct, frozen=True, gc=False):
    """A worker did ``activity`` from ``began`` on for ``seconds``. ``stage`` counts the worker's reports."""

    worker: WorkerId
    activity: str
    began: float
    seconds: float
    stage: int


@dataclass(frozen=True, slots=True)
class TimelineView:
    """Seconds are those since the first stage began, on the workers' clock; the last was over after ``span``."""

    workers: list[WorkerId]
    """In the order in which they began."""
    busy: list[float]
    """The seconds of each."""
    span: float
    activities: set[str]
    bars: list[Bar]
    """Empty if there are too many."""
    shares: list[dict[tuple[str, int], _Floats]]
    """Then, for each worker: the shares of the pieces, shape ``(PIECES,)``, that went into an activity; those of its
    even and its odd stages apart. Bars overlap, and shares sum to more than 1, where workers of two clusters have one
    name."""


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


def timeline_view(book: Book) -> TimelineView | None:
    """``None``: nothing was trained."""
    drawn = list(bars(book))
    if not drawn:
        return None
    first = min([bar.began for bar in drawn])
    span = max([bar.began + bar.seconds for bar in drawn]) - first
    busy: dict[WorkerId, float] = {}
    since: dict[WorkerId, float] = {}
    for bar in drawn:
        worker = bar.worker
        busy[worker] = busy.get(worker, 0.0) + bar.seconds
        if bar.began < since.get(worker, math.inf):
            since[worker] = bar.began
    workers = sorted(busy, key=lambda worker: since[worker])
    few = len(drawn) <= MOST_BARS
    return TimelineView(
        workers=workers,
        busy=[busy[worker] for worker in workers],
        span=span,
        activities={bar.activity for bar in drawn},
        bars=[msgspec.structs.replace(bar, began=bar.began - first) for bar in drawn] if few else [],
        shares=[] if few else _shares(drawn, workers, first, span),
    )


def _shares(
    drawn: list[Bar], workers: list[WorkerId], first: float, span: float
) -> list[dict[tuple[str, int], _Floats]]:
    """O(bars log bars), however short they are."""
    import numpy as np

    found: list[dict[tuple[str, int], tuple[list[float], list[float]]]] = [{} for _ in workers]
    mine = dict(zip(workers, found, strict=True))
    for bar in drawn:
        kinds = mine[bar.worker]
        kind = bar.activity, bar.stage % 2
        if kind not in kinds:
            kinds[kind] = [], []
        starts, seconds = kinds[kind]
        starts.append(bar.began)
        seconds.append(bar.seconds)
    edges = np.linspace(0.0, span, PIECES + 1)

    def shares(starts: list[float], seconds: list[float]) -> _Floats:
        start = np.array(starts) - first
        stop = start + np.array(seconds)
        return np.asarray(np.diff(_before(edges, start) - _before(edges, stop)) * (PIECES / span))

    return [{kind: shares(*times) for kind, times in kinds.items()} for kinds in found]


def _before(edges: _Floats, moments: _Floats) -> _Floats:
    """For each edge, the time that has passed since each of the moments before it, summed."""
    import numpy as np

    ordered = np.sort(moments)
    count = np.searchsorted(ordered, edges)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    return np.asarray(count * edges - sums[count], dtype=np.float64)
