"""Follows a search and updates its display at a limited rate, with an estimate of the remaining time."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import geometric_mean
from types import TracebackType
from typing import TYPE_CHECKING

from optuna.study import StudyDirection
from optuna.trial import TrialState

from hpstage.search.forecast import Forecast
from hpstage.search.progress.view import Display, ProgressView

if TYPE_CHECKING:
    from pathlib import Path

    import optuna

    from hpstage.accounting.savings import Savings
    from hpstage.driver.driver import Driver
    from hpstage.executor import Page
    from hpstage.scheduler.remaining import RemainingWork
    from hpstage.search.session import Session


# A new forecast is made if the number of the algorithm's calls has grown, the seconds per step have changed, or the
# predicted time has passed by the first three of these shares; but not before time has grown by the last of them.
_GROWN, _DRIFTED, _PASSED, _AGAIN = 0.05, 0.1, 0.25, 0.01
# A forecast is the geometric mean of several simulations, since it is as likely to be too high by some factor as too
# low: of at most _PLAYS, and no more once they have _RESULTS results together. A simulated time is at least one second.
_PLAYS, _RESULTS = 13, 4_000


class TimeLeft:
    """Estimates the seconds left from forecasts, which are repeated during the search, more often while little is
    known. Over n results, O(log n) forecasts are made, each of which simulates the whole search a few times."""

    def __init__(self) -> None:
        self._made = 0.0
        self._end: float | None = None
        self._next = 0.0  # number of calls above which a new forecast is made
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
        # The work requested so far is a lower bound.
        return max(self._end - elapsed, remaining.path_seconds, remaining.work_seconds / workers)


def _forecast(session: Session, driver: Driver, more: int, workers: float) -> tuple[float, int]:
    """Return the seconds left, and the number of simulated results."""
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


# Minimum seconds between two views.
_INTERVAL = 0.2


class Progress:
    """Builds views from the state of session and driver, at most five a second. O(1) in the number of trials, except
    for forecasts (:class:`TimeLeft`). Does nothing while nobody watches.

    Args:
        display: ``None`` if nothing is shown.
        study: the study being searched.
        page: receives the time left while somebody looks at it.
        address: URL of the page, shown first.
        kept: the folder of the store, if the user did not choose one.
        deadline: when the search stops because of its time limit, on ``clock``.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        display: Display | None,
        study: optuna.Study,
        page: Page | None = None,
        *,
        address: str | None = None,
        kept: Path | None = None,
        deadline: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._display = display
        self._study = study
        self._page = page
        self._address = address
        self._kept = kept
        self._deadline = deadline
        self._clock = clock
        self._began = clock()
        self._next = 0.0
        self._last: ProgressView | None = None
        self._session: Session | None = None
        self._time_left = TimeLeft()
        self._steps = 0  # the largest number of steps shown, below which no later estimate falls
        self._steps_reported = 0
        self._best_before: float | None = None

    def update(self, session: Session, driver: Driver) -> None:
        """Show the current state of the search, if a new view is due."""
        watched = self._page is not None and self._page.is_watched
        now = self._clock()
        if (self._display is None and not watched) or now < self._next:
            return
        self._next = now + _INTERVAL
        remaining = driver.remaining_work()
        left = self._seconds_left(session, driver, remaining, now)
        if self._page is not None and watched:
            self._page.show(session.name, left)
        if self._display is None:
            return
        self._session = session
        view = self._view(session, driver, remaining, now, left)
        if self._last is None:
            if self._address is not None:
                self._display.write(f"Watch it at {self._address}")
            if self._kept is not None:
                self._display.write(f"What is trained is kept: hpstage status {shlex.quote(str(self._kept))}")
            self._display.begin(view)
        else:
            self._display.show(view)
        self._last = view

    def finish(self, session: Session, driver: Driver, savings: Savings) -> None:
        """Record the final state of the search; it is shown when the context is left."""
        if self._display is not None:
            view = replace(self._view(session, driver, driver.remaining_work(), self._clock(), None), over=True)
            # Estimates have changed since the search began, those of earlier searches of the study as well.
            rate = savings.merge_rate if savings.could_share else None
            view = replace(
                view,
                saved_seconds=savings.saved_seconds,
                merge_rate=rate,
                open=_open(session),
                steps_trained=self._steps_reported,
            )
            if self._last is None:
                self._display.begin(view)
            self._last = view

    def _seconds_left(self, session: Session, driver: Driver, remaining: RemainingWork, now: float) -> float | None:
        if session.expected is not None and session.states.total() >= session.expected:
            return 0.0  # all trials have ended, for example if a completed search is called again
        left = self._time_left.at(now - self._began, session, driver, remaining)
        if self._deadline is None or not driver.plan.totals.steps_trained:
            return left
        rest = max(0.0, self._deadline - now)
        return rest if left is None else min(left, rest)

    def _view(
        self, session: Session, driver: Driver, remaining: RemainingWork, now: float, seconds_left: float | None
    ) -> ProgressView:
        plan, scheduler = driver.plan, driver.scheduler
        record, tally = plan.searches[session.name], driver.accounting.tallies[session.name]
        since = tally.sums.since(tally.before)
        could_share = len(session.trials) > 1 or since.steps_first < since.steps_unique
        if self._last is None:
            self._best_before = _best_value(self._study)
        self._steps_reported = since.steps_trained
        steps = since.steps_trained + remaining.steps_left
        self._steps = min(steps, max(self._steps, since.steps_trained + remaining.steps_since))
        one = len(record.started.metric) == 1
        best, at = self._best(session) if one else (None, None)
        return ProgressView(
            study=self._study.study_name,
            complete=session.states[TrialState.COMPLETE],
            pruned=session.states[TrialState.PRUNED],
            failed=session.states[TrialState.FAIL],
            paused=session.paused(record.paused),
            queued=record.queued + max(0, (session.expected or 0) - len(session.trials)),
            n_trials=session.expected,
            metric=record.started.metric[0] if one else None,
            best=best,
            best_step=at,
            stages_done=since.stages_done,
            stages_left=remaining.stages_left,
            steps_trained=self._steps,
            steps_left=steps - self._steps,
            running=len(scheduler.workers.chains()),
            workers=scheduler.workers.hosts,
            # Of the whole study, as on the page: there is no count of the unique steps of this call's trials.
            merge_rate=tally.sums.merge_rate if could_share else None,
            used_seconds=since.worker_seconds,
            saved_seconds=since.alone_seconds(plan.totals.average_evaluate_seconds) - since.worker_seconds,
            elapsed=now - self._began,
            seconds_left=seconds_left,
        )

    def _best(self, session: Session) -> tuple[float | None, int | None]:
        """Return the best value, and the step at which it was reported if its trial is not complete."""
        known = [value for value in (self._best_before, session.best) if value is not None]
        if not known:
            return session.leading or (None, None)
        return (max if self._study.direction == StudyDirection.MAXIMIZE else min)(known), None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is not None and self._last is not None:
            self._display.end(self._last if self._last.over else self._broken_off(self._last))

    def _broken_off(self, last: ProgressView) -> ProgressView:
        """Return the last view of a search ended by an exception. Plan and tree may be inconsistent and are not
        read."""
        assert self._session is not None
        states = self._session.states
        best, at = (None, None) if last.metric is None else self._best(self._session)
        return replace(
            last,
            steps_trained=self._steps_reported,
            complete=states[TrialState.COMPLETE],
            pruned=states[TrialState.PRUNED],
            failed=states[TrialState.FAIL],
            best=best,
            best_step=at,
            elapsed=self._clock() - self._began,
            over=True,
            open=_open(self._session),
        )


def _open(session: Session) -> int:
    return len(session.trials) - session.states.total()


def _best_value(study: optuna.Study) -> float | None:
    """Return the study's best value before the search; ``None`` if there is none yet or with several objectives."""
    try:
        return study.best_value
    except (ValueError, RuntimeError):
        return None
