"""The timeline of the activities of each worker. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import msgspec

from hpstage.accounting.book import Book
from hpstage.accounting.pauses import Period, united
from hpstage.plan.facts import ChainLost, StateReached, WorkerId
from hpstage.plan.messages import host_of

TRAIN, EVALUATE, LOAD, SAVE, WASTED, FAILED = "train", "evaluate", "load", "save", "discarded", "failed"
ACTIVITIES = (TRAIN, EVALUATE, LOAD, SAVE, WASTED, FAILED)
"""``discarded``: training that was lost with its worker, or stopped. ``failed``: training in which the user's code
raised."""

MOST_BARS = 4000
"""Maximum number of bars kept individually. If there are more, each worker's time is cut into ``PIECES`` pieces of
equal length."""
PIECES = 1600


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

    @property
    def present(self) -> list[float]:
        """The seconds for which each worker was present."""
        return [sum([stop - start for start, stop in periods]) for periods in self.there]

    @property
    def busy_shares(self) -> list[float]:
        """The share of busy time of each worker, from the first to the last stage of the calls in which it worked."""
        return [min(1.0, busy / present) for busy, present in zip(self.busy, self.present, strict=True)]

    @property
    def busy_share(self) -> float:
        """That of all workers. It is not the share of allocated time, which begins when workers start."""
        return min(1.0, sum(self.busy) / sum(self.present))

    @property
    def is_constant(self) -> bool:
        """Whether all workers were present from the first to the last stage."""
        return min(self.present) >= self.span


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
