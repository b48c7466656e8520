"""The steps requested and trained over the course of a search. Pure."""

from __future__ import annotations

import msgspec

from hpstage.accounting.book import Book
from hpstage.accounting.sums import merge_rate
from hpstage.plan.facts import NodeId, TrialId
from hpstage.plan.nodes import first_walked


class Moment(msgspec.Struct, frozen=True, gc=False):
    """The steps requested of a book's trials and trained for them until ``seconds`` after the first stage began. Pauses
    between calls do not count."""

    seconds: float
    requested: int
    unique: int
    trained: int

    @property
    def rate(self) -> float:
        return merge_rate(self.requested, self.unique)


def moments(book: Book) -> list[Moment]:
    """Return the book's history: its counts at each time of a request or of a finished stage.

    ``unique`` counts the unique steps among those ``requested``, regardless of which study trains them, so that the
    final rate is the book's merge rate. ``trained`` counts the steps that the book's trials were charged, repetitions
    included. Requests have no time; each is placed at the latest worker time recorded in the journal before it.
    """
    first = min(book.began, default=None)
    if first is None:
        first = min((target.at for target in book.account.targets if target.at is not None), default=0.0)
    requested, trained = _requested(book, first), _trained(book, first)
    found: list[Moment] = []
    steps, done = (0, 0), 0
    for seconds in sorted({*requested, *trained}):
        steps, done = requested.get(seconds, steps), trained.get(seconds, done)
        found.append(Moment(seconds, *steps, done))
    return found


def _requested(book: Book, first: float) -> dict[float, tuple[int, int]]:
    """Return the steps requested, and the unique ones among them, up to each time of a request."""
    reach: dict[NodeId, int] = {}
    reached: dict[TrialId, int] = {}
    requested = unique = 0
    found: dict[float, tuple[int, int]] = {}
    now = first
    for target in book.account.targets:
        # Monotonic: a host's clock may be wrong, and requests keep their order.
        if target.at is not None and target.at > now:
            now = target.at
        trial = book.trials.get(target.trial)
        if trial is None:
            continue
        step = min(target.step, trial.requested)  # its training may have ended before
        unique += sum([stop - start for _, start, stop in first_walked(trial.path_to(step), reach)])
        requested += step - reached.get(target.trial, 0)
        reached[target.trial] = step
        found[now] = requested, unique
    return dict(zip(book.pauses.all_elapsed(first, found), found.values(), strict=True))


def _trained(book: Book, first: float) -> dict[float, int]:
    """Return the steps trained up to each time when a stage finished."""
    facts = [charge.fact for charge in book.charges]
    times = book.pauses.all_elapsed(first, [fact.at for fact in facts])
    done = sorted(zip(times, [fact.step - fact.start for fact in facts], strict=True))
    found: dict[float, int] = {}
    trained = 0
    for at, steps in done:
        trained += steps
        found[at] = trained
    return found
