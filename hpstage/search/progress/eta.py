"""Estimate of the remaining time of a search."""

from __future__ import annotations

from statistics import geometric_mean
from typing import TYPE_CHECKING

from hpstage.search.forecast import Forecast

if TYPE_CHECKING:
    from hpstage.driver.driver import Driver
    from hpstage.scheduler.remaining import RemainingWork
    from hpstage.search.session import Session

# The growth of the algorithm's calls, the change of the seconds per step, and the part of the predicted time after
# which a new forecast is made; but not before this part of the time so far has passed again.
_GROWN, _DRIFTED, _PASSED, _AGAIN = 0.05, 0.1, 0.25, 0.01
# A forecast is the mean of so many plays at most, as long as they have fewer results together: the geometric one, which
# is as likely to be off by some factor in either direction. Plays of less than a second are taken for one.
_PLAYS, _RESULTS = 13, 4_000


class TimeLeft:
    """Estimates the seconds left from forecasts, which are repeated during the search, more often while little is
    known. Over n results, O(log n) forecasts are made, each of which simulates the whole search a few times."""

    def __init__(self) -> None:
        self._made = 0.0
        self._end: float | None = None
        self._next = 0.0  # number of calls
        self._workers = 0.0
        self._pace = 0.0

    def at(self, elapsed: float, session: Session, driver: Driver, remaining: RemainingWork) -> float | None:
        """Return the seconds left, ``elapsed`` seconds after the search began; ``None`` without workers, before a step
        was measured, or if the number of trials is unknown."""
        totals, workers = driver.plan.totals, driver.scheduler.workers.strength()
        expected = len(session.trials) if session.stopping else session.expected
        if not totals.steps_trained or not session.trials or not workers or expected is None:
            return None
        calls, pace = len(session.history.calls), totals.average_step_seconds
        if self._end is None or (
            elapsed - self._made > _AGAIN * elapsed
            and (
                calls > self._next
                or workers != self._workers
                or abs(pace - self._pace) > _DRIFTED * self._pace
                or elapsed - self._made > _PASSED * (self._end - self._made)
            )
        ):
            seconds, results = _forecast(session, driver, expected - len(session.trials), workers)
            self._workers, self._pace, self._made, self._end = workers, pace, elapsed, elapsed + seconds
            self._next = calls + max(_GROWN * calls, _GROWN * results if results > _RESULTS else 0.0)
        # The work requested so far is known better.
        return max(self._end - elapsed, remaining.path_seconds, remaining.work_seconds / workers)


def _forecast(session: Session, driver: Driver, more: int, workers: float) -> tuple[float, int]:
    """Return the seconds left, and how many results were played."""
    running = driver.running()
    found: list[float] = []
    results = 0
    while len(found) < _PLAYS and results < _RESULTS:
        play = Forecast(
            session.history, session.trials, driver.plan, more=more, running=running, workers=workers, seed=len(found)
        )
        found.append(max(1.0, play.seconds()))
        results += play.results
    return geometric_mean(found), results
