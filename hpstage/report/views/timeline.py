"""What the worker timeline shows: what each worker did, when."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import msgspec

from hpstage.plan.facts import StateReached, WorkerId
from hpstage.report.book import Book
from hpstage.report.pauses import Period, united

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
    """Seconds are those since the first stage began, on the workers' clock, without the pauses between calls; the last
    stage was over after ``span``."""

    workers: list[WorkerId]
    """In the order in which they began."""
    busy: list[float]
    """The seconds of each."""
    there: list[list[Period]]
    """When each was there, as far as the journal tells: during the calls in which it did something."""
    span: float
    pauses: list[float]
    """When there were any."""
    activities: set[str]
    bars: list[Bar]
    """Empty if there are too many."""
    shares: list[dict[tuple[str, int], array[float]]]
    """Then, for each worker: the shares of its ``PIECES`` pieces that went into an activity; those of its
    even and its odd stages apart. Bars overlap, and shares sum to more than 1, where workers of two clusters have one
    name."""


def bars(book: Book) -> Iterator[Bar]:
    """What workers did for the book's trials, on their clock. What took no time has no bar."""
    stages: dict[WorkerId, int] = {}
    for at, charge in zip(book.began, book.charges, strict=True):
        fact = charge.fact
        stage = stages[fact.worker] = stages.get(fact.worker, 0) + 1
        for activity, seconds in _activities(fact):
            yield Bar(fact.worker, activity, at, seconds, stage)
            at += seconds
    for waste in book.wastes:
        lost = waste.fact
        if lost.seconds > 0:
            yield Bar(lost.worker, WASTED, lost.at - lost.seconds, lost.seconds, 0)


def _activities(fact: StateReached) -> list[tuple[str, float]]:
    """What took time, and how much, in the order in which it was done; ``fact.at`` is the end of the last."""
    found = []
    if fact.load_seconds > 0:
        found.append((LOAD, fact.load_seconds))
    if fact.train_seconds > 0:
        found.append((TRAIN, fact.train_seconds))
    if fact.evaluate_seconds > 0:
        found.append((EVALUATE, fact.evaluate_seconds))
    if fact.save_seconds > 0:
        found.append((SAVE, fact.save_seconds))
    return found


def timeline_view(book: Book) -> TimelineView | None:
    """``None``: nothing was trained."""
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
    return TimelineView(
        workers=workers,
        busy=[its[worker].seconds for worker in workers],
        there=[
            united((elapsed(start), min(span, elapsed(stop))) for start, stop in book.presence[worker])
            for worker in workers
        ],
        span=span,
        pauses=[elapsed(start) for start, _ in book.pauses.gaps if start > first],
        activities=found,
        bars=[msgspec.structs.replace(bar, began=elapsed(bar.began)) for bar in drawn] if few else [],
        shares=shares,
    )


def _shares(
    book: Book, workers: list[WorkerId], elapsed: Callable[[float], float], span: float
) -> list[dict[tuple[str, int], array[float]]]:
    """O(bars + workers x pieces)."""
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
            if end < PIECES:  # else it is too short to be told from the end
                shares[begin] += stop - start
            continue
        shares[begin] += begin + 1 - start
        for piece in range(begin + 1, end):
            shares[piece] += 1.0
        if end < PIECES:
            shares[end] += stop - end
    return found
