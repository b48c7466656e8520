"""What the picture of the merge rate shows: steps asked, distinct, and trained, as the search went on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from hpstage.plan.facts import NodeId, TrialId
from hpstage.report.book import Book

_POINTS = 1000  # of a curve: more cannot be told apart


class Moment(msgspec.Struct, frozen=True, gc=False):
    """What had been asked of a book's trials, and trained for them, ``seconds`` after the first stage began, without
    the pauses between calls."""

    seconds: float
    asked: int
    distinct: int
    trained: int

    @property
    def rate(self) -> float:
        return self.asked / self.distinct if self.distinct else 1.0


@dataclass(frozen=True, slots=True)
class MergeRateView:
    """As many moments as a curve needs, the last among them; none where nothing was asked."""

    moments: list[Moment]
    pauses: int
    """Between calls, left out."""


def merge_rate_view(book: Book) -> MergeRateView:
    found = moments(book)
    return MergeRateView(_thinned(found) if found and found[-1].asked else [], len(book.pauses.gaps))


def moments(book: Book) -> list[Moment]:
    """The book's history: what had come to pass at each time when something was asked, or a stage was done.

    ``distinct`` counts the steps among ``asked`` that differ, whoever trains them, so that the rate at the end is the
    search's merge rate; ``trained`` those that the book's trials paid for, repetitions included. Requests have no time
    of their own: each is put at the latest time of a worker that the journal told before it.
    """
    first = min(book.began, default=None)
    if first is None:
        first = min((ask.at for ask in book.account.asks if ask.at is not None), default=0.0)
    asked, trained = _asked(book, first), _trained(book, first)
    found: list[Moment] = []
    steps, done = (0, 0), 0
    for seconds in sorted({*asked, *trained}):
        steps, done = asked.get(seconds, steps), trained.get(seconds, done)
        found.append(Moment(seconds, *steps, done))
    return found


def _asked(book: Book, first: float) -> dict[float, tuple[int, int]]:
    """The steps that were asked for, and the distinct ones among them, up to each time when something was."""
    is_whole = len(book.trials) == len(book.account.plan.trials)
    reach: dict[NodeId, int] = {}
    reached: dict[TrialId, int] = {}
    asked = distinct = 0
    found: dict[float, tuple[int, int]] = {}
    now = first
    for ask in book.account.asks:
        # Never back: a host's clock may be wrong, and requests stay in their order.
        if ask.at is not None and ask.at > now:
            now = ask.at
        if is_whole:
            found[now] = ask.steps_asked, ask.steps_unique
            continue
        trial = book.trials.get(ask.trial)
        if trial is None:
            continue
        for node, start, stop in trial.legs(ask.step):
            fresh = stop - reach.get(node.id, start)
            if fresh > 0:
                distinct += fresh
                reach[node.id] = stop
        asked += ask.step - reached.get(ask.trial, 0)
        reached[ask.trial] = ask.step
        found[now] = asked, distinct
    return dict(zip(book.pauses.all_elapsed(first, found), found.values(), strict=True))


def _trained(book: Book, first: float) -> dict[float, int]:
    """The steps that were trained up to each time when a stage was done."""
    facts = [charge.fact for charge in book.charges]
    times = book.pauses.all_elapsed(first, [fact.at for fact in facts])
    done = sorted(zip(times, [fact.step - fact.start for fact in facts], strict=True))
    found: dict[float, int] = {}
    trained = 0
    for at, steps in done:
        trained += steps
        found[at] = trained
    return found


def _thinned(found: Sequence[Moment]) -> list[Moment]:
    """The last of each thousandth of the time: counts only grow, and so lose nothing that could be seen."""
    if len(found) <= _POINTS:
        return list(found)
    span = max(found[-1].seconds, 1e-9)
    return list({int(_POINTS * moment.seconds / span): moment for moment in found}.values())
