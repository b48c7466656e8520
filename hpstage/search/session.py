"""The main loop of ``optimize``, between an Optuna study and an algorithm on one side and the driver on the other."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Literal

import optuna
from optuna.trial import TrialState

from hpstage.algorithm import Action, Ask, Finish, Fork
from hpstage.driver.driver import Driver
from hpstage.errors import UsageError
from hpstage.execution.outcomes import failure_of, is_misuse, training_error
from hpstage.optuna.ledger import Ledger
from hpstage.optuna.private import is_feasible
from hpstage.plan.facts import SearchEnded, SearchStarted, TrialId, UserFailure
from hpstage.plan.plan import SearchPlan
from hpstage.schedule.space import Described
from hpstage.scheduler.answers import Answer
from hpstage.search.costs import COSTS
from hpstage.search.forecast import Forecast
from hpstage.search.history import History
from hpstage.search.outcomes import Outcomes
from hpstage.search.plateaus import PlateauTargets
from hpstage.search.request import Request
from hpstage.search.signals import Interruption
from hpstage.search.targets import Targets
from hpstage.search.trials import Roster, SessionTrial
from hpstage.training.adapter import noisy_of

logger = logging.getLogger("hpstage")

# Seconds to wait for reports before checking the clock, the progress display and Ctrl-C again.
_HEARTBEAT = 0.5

# The search adapts to a loss of workers only if less than this share of them is left.
_MISSED = 0.75

# Number of workers in a forecast of how many the search can use.
_UNLIMITED = 1_000_000

_PRUNED = f"{optuna.TrialPruned.__module__}.{optuna.TrialPruned.__qualname__}"


class Session:
    """Passes targets to the driver and results to the algorithm and the study, until the search is over."""

    def __init__(
        self,
        request: Request,
        ledger: Ledger,
        driver: Driver,
        started: SearchStarted,
        *,
        before_first: Callable[[Described], Set[str]],
        deadline: float | None,
        interruption: Interruption,
        prolongs: bool,
        on_change: Callable[[Session], None],
    ) -> None:
        algorithm = request.algorithm
        setting = replace(request.setting, n_trials=started.n_trials, workers=started.workers)
        self.name = started.study  # in the plan
        self.states: Counter[TrialState] = Counter()  # of finished trials
        self.best: float | None = None  # of the feasible trials completed in this call, if there is one objective
        self.leading: tuple[float, int] | None = None  # the best value reported at any step, and the step
        self._better = max if setting.maximize else min
        self._request = request
        self._ledger = ledger
        self._driver = driver
        self._roster = roster = Roster(request, ledger, driver, started, before_first)
        self.trials: Sequence[SessionTrial] = roster.trials
        self.history = History(algorithm, setting, roster)
        self._workers = setting.workers  # the algorithm keeps enough trials open for so many
        self._wants_more = not algorithm.synchronous  # whether it may request more targets for idle workers
        self._foreseen_at = 0, 0, 0.0  # of the last forecast: number of calls, steps trained, and time
        self._foreseen: list[tuple[float, float]] = []  # start and end of each target that workers will train
        driver.scheduler.demands.foresee = self._foresee
        self._started = started
        self._catch = tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in request.catch)
        self._deadline = deadline
        self._interruption = interruption
        self._on_change = on_change
        self._prolongs = prolongs  # trains finished trials further
        self._used_before = driver.plan.totals.worker_seconds
        self._targets = Targets(synchronous=algorithm.synchronous, by_length=algorithm.by_length)
        self._plateaus = PlateauTargets(driver, roster.plan)
        known = {*started.metric, *evaluated(driver.plan)}
        self._outcomes = Outcomes(ledger, driver, started, noisy=noisy_of(request.trainable), known=known)
        self.stopping = False  # whether proposing has stopped before all requested trials were proposed
        self._stopped = False  # by study.stop()
        self._exhausted = False
        self._closed = False
        self._raised: UserFailure | None = None

    @property
    def expected(self) -> int | None:
        """Expected number of trials; ``None`` if limited only by time or the space."""
        known, n_trials = len(self.trials), self._started.n_trials
        if self._exhausted:
            return known
        return None if n_trials is None else known + max(0, n_trials - self._roster.proposed)

    def _foresee(self, now: float, after: float, least: float) -> int:
        """See :attr:`hpstage.scheduler.demand.Demands.foresee`. The forecast is made again when the search has
        progressed, or when it is more than ``after`` seconds old."""
        calls, trained, made = self._foreseen_at
        at = len(self.history.calls), self._driver.plan.totals.steps_trained
        if (at != (calls, trained) or now > made + after) and self.expected is not None and not self.stopping:
            forecast = Forecast(
                self.history,
                self.trials,
                self._driver.plan,
                more=self.expected - len(self.trials),
                running=self._driver.running(),
                workers=_UNLIMITED,
                seed=0,
            )
            made = now
            self._foreseen_at, self._foreseen = (*at, made), forecast.trained(2 * after)
        then = now - made + after
        return sum(began <= then and done >= then + least for began, done in self._foreseen)

    def paused(self, known: Iterable[TrialId]) -> int:
        """Return how many of the trials that are paused in the plan have not ended: the plan records ends later."""
        return sum(not self._roster.by_id[trial].finished for trial in known)

    # --- the loop -----------------------------------------------------------------------------------------

    def run(self, present: int) -> None:
        """Run until the algorithm is done, the time is up, or an uncaught failure stops the study.

        An interruption ends it early. No further results are reported then: the next call reports them in order.

        Args:
            present: the number of workers, before any report of theirs is read.
        """
        if present != self._workers:
            self._resize(present)
        if not self._roster.begin():
            return
        self.stopping |= self._roster.stopped
        for trial in self.trials:
            if trial.finished:
                self._count(trial, 1)
                if trial.id not in self._driver.plan.ended:
                    self._outcomes.note(trial)  # the study was updated, and then the call was interrupted
        for trial in list(self.trials):
            if trial.rejected is not None:
                self._end_by(trial, trial.rejected)
            elif trial.fork is None:
                self._perform(self.history.added(trial.index))
        while True:
            self._propose()
            if self._interruption.requested:
                self._driver.finish()
                return
            if self._stopped:
                self._stop()
                if self._interruption.requested:
                    return
                break
            if not self._targets and (self.stopping or not self._more()):
                break
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._drain()
                self._raise_uncaught()
                return
            self._fill()
            self._take(self._driver.wait(self._patience()))
            self._follow_workers()
            self._report_known()
            self._on_change(self)
            if self._raised is not None:
                self._drain()
                self._raise_uncaught()
        for fork in self._roster.unclaimed:
            self._finish(fork, TrialState.PRUNED)  # an extended search decided otherwise
        self._roster.end()
        self._driver.finish()
        self._driver.log.write([SearchEnded(self._started.study, time.time())])
        self._raise_uncaught()  # a chain that was completed after study.stop() may have failed
        self._audit_rest()

    def _audit_rest(self) -> None:
        """Audit kinds of values that were not audited in idle time, within the budget, once all results are safe."""
        used = self._driver.plan.totals.worker_seconds - self._used_before
        workers = self._driver.scheduler.workers.hosts
        if not workers or self._stopped:
            return
        seconds = self._request.audit_budget * used / workers  # all of them wait
        if self._deadline is not None:
            seconds = min(seconds, self._deadline - time.monotonic())
        self._driver.audit_rest(seconds, self._waits_for_audits)

    def _waits_for_audits(self) -> bool:
        self._on_change(self)
        return not self._interruption.requested

    def _raise_uncaught(self) -> None:
        """Raise :class:`TrainingError` if a trial has failed with an exception that ends the search."""
        if self._raised is not None:
            raise training_error(self._raised)

    def _more(self) -> bool:
        n_trials = self._started.n_trials
        return not self._exhausted and (n_trials is None or self._roster.proposed < n_trials)

    def _patience(self) -> float:
        if self._deadline is None:
            return _HEARTBEAT
        return max(0.0, min(_HEARTBEAT, self._deadline - time.monotonic()))

    def _take(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            index = self._roster.by_id[answer.trial].index
            for known in (answer, *self._plateaus.take(answer)):
                self._targets.answer(index, known)

    def _drain(self) -> None:
        """Complete running chains and start no more. The next call continues unfinished trials."""
        self.stopping = True
        self._driver.scheduler.draining = True
        while self._driver.scheduler.running:
            if self._interruption.requested:
                self._driver.finish()
                return
            self._take(self._driver.wait(_HEARTBEAT))
            self._report_known()
            self._on_change(self)

    def _stop(self) -> None:
        """End the search after ``study.stop()``: complete running chains, and end all trials."""
        self._drain()
        for trial in self.trials:
            if trial.finished or self._interruption.requested:
                continue
            trial.attrs["hpstage:ended"] = "study.stop()"
            for answer in self._targets.known(trial.index):
                self._pass(trial, answer)
            if trial.values is not None or trial.reported:
                self._finish(trial, TrialState.PRUNED)
                continue
            trial.state = self._ledger.withdraw(self._ledger.trial(trial.storage_id), trial.attrs)
            if trial.finished:
                self._outcomes.note(trial)
                self._count(trial, 1)

    # --- proposing and requesting -------------------------------------------------------------------------

    def _propose(self) -> None:
        while not self.stopping and self._more() and self.history.room() > 0:
            if self._interruption.requested:
                return
            self._exhausted = self._roster.exhausted()
            if self._exhausted:
                break
            if self._deadline is not None and time.monotonic() >= self._deadline:
                return
            trial = self._roster.propose()
            self.stopping |= self._ledger.take_stop()  # by the space or the sampler: proposed trials continue
            if trial.rejected is None:
                self._perform(self.history.added(trial.index))
            else:
                self._end_by(trial, trial.rejected)
        if not self._closed and (self.stopping or not self._more()):
            self._closed = True
            self._perform(self.history.closed())

    def _follow_workers(self) -> None:
        """Adapt the number of open trials to the number of workers. Workers that fail and are replaced, or have yet to
        join, do not count as a change: otherwise, the proposals would depend on them."""
        workers = self._driver.scheduler.workers
        gone = workers.most >= self._workers and 0 < workers.hosts < _MISSED * self._workers
        if workers.hosts > self._workers or gone:
            self._resize(workers.hosts)

    def _resize(self, workers: int) -> None:
        self._workers = workers
        self._wants_more = not self.history.synchronous
        self._perform(self.history.resized(workers))

    def _fill(self) -> None:
        """Allow an asynchronous algorithm to request more while workers are idle."""
        while self._wants_more and not self.stopping and not self._interruption.requested and self._more():
            idle, calls = self._driver.idle(), len(self.history.calls)
            if not idle:
                return
            self._perform(self.history.idle(idle))
            self._propose()
            self._wants_more = len(self.history.calls) > calls + 1

    def _perform(self, actions: Iterable[Action]) -> None:
        trials = self.trials
        for action in actions:
            match action:
                case Ask(index, step):
                    self._ask(trials[index], step)
                case Fork():
                    self._perform(self.history.forked(self._fork(action).index, action))
                case Finish(index, state):
                    self._finish(trials[index], TrialState.COMPLETE if state == "complete" else TrialState.PRUNED)

    def _fork(self, fork: Fork) -> SessionTrial:
        """Create and return the trial of the first parameters that the space does not reject, else of the last ones."""
        for params in (fork.params, *fork.alternatives):
            trial = self._roster.fork(fork, params)
            self._stopped |= self._ledger.take_stop()  # a population cannot continue without forks
            self.stopping |= self._stopped
            if trial.rejected is None:
                break
            self._end_by(trial, trial.rejected)
        return trial

    def _ask(self, trial: SessionTrial, step: int) -> None:
        end = self._roster.end_of(trial, step)
        if trial.finished and trial.barred is None:
            if self._prolongs:
                if end > self._roster.reach(trial) and self._driver.plan.ending_on(trial.id, end) is None:
                    self._count(trial, -1)
                    self._roster.carry_on(trial)
            elif not self._driver.knows(trial.id, end):
                # The interrupted run of an asynchronous search decided otherwise.
                trial.barred = UserFailure(summary="ended in an earlier session", traceback="")
        if trial.barred is not None and not self._driver.knows(trial.id, end):
            self._targets.ask(trial.index, step, end=end)
            self._targets.answer(trial.index, Answer(trial.id, end, None, trial.barred))
        else:
            steps = self._targets.ask(trial.index, step, self._on_the_way(trial, end), end=end)
            self._plateaus.ask(trial.id, steps)

    def _on_the_way(self, trial: SessionTrial, step: int) -> list[int]:
        """Return the steps before a target at which to evaluate: where a metric decides a schedule, and, if that takes
        no retraining, those of ``evaluate_every``."""
        every, plan = self._request.evaluate_every, self._driver.plan
        if trial.id not in plan.trials:
            return []
        planned, begun = plan.trials[trial.id], self._targets.reach(trial.index)
        looks = self._plateaus.looks(planned, begun, step)
        if every is None:
            return sorted(looks)
        found = {state.step for state in planned.states() if state.kept or state.metrics is not None}
        lines = {node.id: stop for node, _, stop in planned.path_to(planned.steps)}
        of_others = [chain for chain in plan.chains.values() if chain.driver != self._driver.scheduler.driver]
        passing = {
            min(span.stop, lines[span.node]) for chain in of_others for span in chain.spans if span.node in lines
        }
        trained = max(found | passing, default=0)
        steps = range(begun - begun % every + every, step, every)
        return sorted(looks.union(other for other in steps if other > trained or other in found))

    # --- reporting ----------------------------------------------------------------------------------------

    def _report_known(self) -> None:
        """Report known results to the algorithm: in the order requested if it is synchronous, else as they arrive."""
        while not self._interruption.requested and (next := self._targets.next()) is not None:
            step, answers = next
            trial = self._roster.by_id[answers[-1].trial]
            for answer in answers[:-1]:
                self._pass(trial, answer)
            self._report_answer(trial, step, answers[-1])
            if self.history.synchronous:
                # Before the next result is reported: proposals must not depend on which results arrived together.
                self._propose()

    def _pass(self, trial: SessionTrial, answer: Answer) -> None:
        """Report values to the study but not to the algorithm. A failure is left to the target's own answer."""
        if answer.metrics is not None:
            metrics = self._measured(trial, answer)
            values = self._values(metrics)
            if not any(map(math.isnan, values)):
                trial.metrics = metrics
                self._report(trial, _reached(answer), values)

    def _measured(self, trial: SessionTrial, answer: Answer) -> dict[str, float]:
        """Return the metrics of a state, with the costs that are objectives."""
        planned, plan = self._driver.plan.trials[trial.id], self._driver.plan
        costs = {name: COSTS[name](plan, planned, _reached(answer)) for name in self._started.metric if name in COSTS}
        return {**(answer.metrics or {}), **costs}

    def _values(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """Return the values of the objectives: NaN for one that is missing."""
        return tuple(metrics.get(name, math.nan) for name in self._started.metric)

    def _report_answer(self, trial: SessionTrial, requested: int, answer: Answer) -> None:
        """Report the answer to the target at step ``requested``; ``answer.step`` is earlier if the trial ends there."""
        index, failure = trial.index, answer.failure
        if answer.ending is not None and not trial.finished:
            trial.attrs["hpstage:ended"] = answer.ending.message[:1000]
            if answer.ending.outcome == "pruned":
                self._outcomes.warn_pruned(trial, answer.ending)
                self._finish(trial, TrialState.PRUNED)
        if answer.ending is not None and answer.ending.outcome == "pruned":
            self._perform(self.history.failed(index))
            return
        if answer.metrics is not None:
            metrics = self._measured(trial, answer)
            values = self._values(metrics)
            unknown = [name for name, value in zip(self._started.metric, values, strict=True) if math.isnan(value)]
            if not unknown:
                trial.values, trial.metrics = values, metrics
            if not unknown or self.history.takes_nan:
                trial.last_reported = max(trial.last_reported, _reached(answer))
                self._report(trial, _reached(answer), values)
            midway = answer.ending is None and answer.step < self._driver.plan.trials[trial.id].steps
            if not unknown or (self.history.takes_nan and midway):
                self._perform(self.history.reported(index, requested, values[0]))
                return
            name, step = unknown[0], _reached(answer)
            if name in metrics:
                # As in Optuna: the trial fails, and the study continues regardless of `catch`.
                summary = f"{name} is NaN at step {step}; raise optuna.TrialPruned where training diverges"
                failure = UserFailure(summary=summary, traceback="")
            else:
                failure = failure_of(UsageError(f"at step {step}, {missing_metric(name, metrics)}"), "", {})
        assert failure is not None
        self._end_by(trial, failure)
        self._perform(self.history.failed(index))

    def _end_by(self, trial: SessionTrial, failure: UserFailure) -> None:
        """End a trial by an exception: of training, of what is called between steps, or of the space."""
        is_pruned = _PRUNED in failure.kinds
        again = not is_pruned and (trial.barred is None or not trial.finished) and self._outcomes.warn(trial, failure)
        if trial.finished:
            return
        if is_pruned:
            trial.attrs["hpstage:ended"] = failure.summary[:1000]
            self._finish(trial, TrialState.PRUNED)
            return
        trial.attrs |= {"hpstage:failure": failure.summary[:1000], "hpstage:traceback": failure.traceback[-20000:]}
        valueless = self.leading is None and not self.states[TrialState.COMPLETE]
        uncaught = failure.kinds and not any(kind in self._catch for kind in failure.kinds)
        if uncaught or (again and valueless and is_misuse(failure, self._catch)):  # other trials would also fail
            self._raised = self._raised or failure
        self._finish(trial, TrialState.FAIL)

    def _report(self, trial: SessionTrial, step: int, values: tuple[float, ...]) -> None:
        if self.leading is None or self._better(self.leading[0], values[0]) != self.leading[0]:
            self.leading = values[0], step
        # Optuna stores intermediate values for a single objective only.
        if not trial.finished and step not in trial.reported and len(values) == 1:
            trial.reported.add(step)
            self._ledger.report(trial.storage_id, step, values[0])

    def _finish(self, trial: SessionTrial, state: TrialState) -> None:
        if trial.finished:
            return  # in an earlier session
        frozen = self._outcomes.end(trial, state, self._roster.metrics)
        if frozen is None:
            return
        self._roster.trial_ended()
        self.stopping |= self._ledger.take_stop()  # a sampler has proposed all that it can: the others continue
        self._count(trial, 1)
        if trial.state == TrialState.COMPLETE and len(frozen.values) == 1 and is_feasible(frozen):
            self.best = frozen.values[0] if self.best is None else self._better(self.best, frozen.values[0])
        for callback in self._request.callbacks:
            callback(self._ledger.study, frozen)
        self._stopped |= self._ledger.take_stop()
        self.stopping |= self._stopped

    def _count(self, trial: SessionTrial, by: Literal[1, -1]) -> None:
        """Count a trial as finished, or with ``by=-1`` as no longer finished."""
        self.states[trial.state] += by


def _reached(answer: Answer) -> int:
    """Return the step whose state has the metrics: the target, or where training has ended before it."""
    return answer.step if answer.ending is None else answer.ending.last


def missing_metric(metric: str, metrics: Mapping[str, float]) -> str:
    return (
        f"the trainable gives {', '.join(map(repr, sorted(metrics))) or 'nothing'}, but metric={metric!r} was requested"
    )


def evaluated(plan: SearchPlan) -> Set[str]:
    """Return the names of the metrics that a plan knows of some state; none if it knows none."""
    states = (state for node in plan.nodes for state in node.states.values())
    return next((state.metrics.keys() for state in states if state.metrics is not None), set())
