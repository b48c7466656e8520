"""One call of ``optimize`` at work: an Optuna study and an algorithm on one side, the driver on the other."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from hpstage.algorithm import Action, Ask, Finish, Search
from hpstage.driver import Driver
from hpstage.errors import TrainingError, UsageError
from hpstage.events import SearchEnded, SearchStarted, TrialAdded, TrialId, TrialProposed, UserFailure
from hpstage.optuna.sampler_state import SamplerState
from hpstage.plan import check_trial
from hpstage.schedule import Scalar, Schedule, as_schedule
from hpstage.scheduling import Answer

logger = logging.getLogger("hpstage")

Space = Callable[[Trial], Mapping[str, Schedule | Scalar]]
Callback = Callable[[optuna.Study, FrozenTrial], None]

# How long to wait for reports before the clock, the progress line and Ctrl-C are looked at again.
_HEARTBEAT = 0.5


@dataclass(slots=True)
class SessionTrial:
    """A trial of this search: its Optuna side and what it is waiting for."""

    index: int
    number: int
    id: TrialId
    optuna: Trial | None  # None: finished in an earlier session
    value: float | None = None
    reported: set[int] = field(default_factory=set)

    @property
    def finished(self) -> bool:
        return self.optuna is None


class Session:
    """Proposes trials, passes targets to the driver and results to the study, until the search is over."""

    def __init__(
        self,
        study: optuna.Study,
        driver: Driver,
        search: Search,
        started: SearchStarted,
        space: Space,
        *,
        synchronous: bool,
        callbacks: Sequence[Callback],
        catch: tuple[type[BaseException], ...],
        deadline: float | None,
        on_change: Callable[[Session], None],
        before_first: Callable[[Mapping[str, Scalar]], None],
    ) -> None:
        self.study = study
        self.driver = driver
        self.trials: list[SessionTrial] = []
        self.finished = 0  # trials that are over
        self.failed = 0  # of these
        self._warned: set[str] = set()
        self._search = search
        self._started = started
        self._space = space
        self._synchronous = synchronous
        self._callbacks = callbacks
        self._catch = tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in catch)
        self._deadline = deadline
        self._on_change = on_change
        self._before_first = before_first
        self._sampler = SamplerState(study.sampler)
        self._asked: deque[tuple[int, int]] = deque()  # targets in the order of asking
        self._known: dict[tuple[int, int], Answer] = {}  # answered, not yet told
        self._by_id: dict[TrialId, SessionTrial] = {}
        self._stopping = False
        self._closed = False
        self._raised: UserFailure | None = None

    # --- the loop -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until the algorithm is done, the time is up, or a failure that is not caught stops the study."""
        self._begin()
        while True:
            self._propose()
            if not self._asked and (self._stopping or not self._more()):
                break
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._drain()
                return
            for answer in self.driver.wait(self._patience()):
                self._known[self._by_id[answer.trial].index, answer.step] = answer
            self._tell()
            self._on_change(self)
            if self._raised is not None:
                self._drain()
                raise TrainingError(
                    f"a trial failed and `catch` does not name its exception: {self._raised.summary}\n"
                    f"{self._raised.traceback}"
                )
        self.driver.finish()
        self.driver.remember([SearchEnded(self._started.study, time.time())])

    def _more(self) -> bool:
        n_trials = self._started.n_trials
        return n_trials is None or len(self.trials) < n_trials

    def _patience(self) -> float:
        if self._deadline is None:
            return _HEARTBEAT
        return max(0.0, min(_HEARTBEAT, self._deadline - time.monotonic()))

    def _drain(self) -> None:
        """Let what runs come to its end and start nothing more. Open trials stay open: the next call goes on."""
        self._stopping = True
        self.driver.drain()
        while self.driver.scheduler.running:
            for answer in self.driver.wait(_HEARTBEAT):
                self._known[self._by_id[answer.trial].index, answer.step] = answer
            self._tell()

    # --- proposing ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start a search, or go on with the one that was interrupted."""
        record = self.driver.plan.searches.get(self._started.study)
        if record is None or not self._continues(record.started, record.ended, record.proposed):
            self._warn_of_another_workload()
            self.driver.remember([self._started, TrialProposed(self._started.study, None, None, self._sampler.take())])
            return
        by_number = {trial.number: trial for trial in self.study.get_trials(deepcopy=False)}
        for proposed in record.proposed:
            if proposed.number is None or proposed.trial is None:
                continue
            frozen = by_number[proposed.number]
            resumed = None if frozen.state.is_finished() else Trial(self.study, frozen._trial_id)
            self._enter(proposed.number, proposed.trial, resumed, set(frozen.intermediate_values))
        self._sampler.put([proposed.sampler for proposed in record.proposed])
        last = max((trial.number for trial in self.trials), default=-1)
        for number, frozen in by_number.items():
            if number > last and not frozen.state.is_finished() and "hpstage:search" in frozen.user_attrs:
                # Cut off while it was being proposed; the next proposal takes its place.
                _withdraw(self.study, frozen)
        for trial in self.trials:
            self._perform(self._search.added(trial.index))

    def _warn_of_another_workload(self) -> None:
        """The study's own best may then be of other code or data than what is trained now."""
        known = self.driver.plan.trials
        name = self.study.study_name
        for trial in self.study.get_trials(deepcopy=False):
            if "hpstage:search" in trial.user_attrs and TrialId(f"{name}/{trial.number}") not in known:
                logger.warning(
                    "Study %r holds trials of another workload (other code, data, environment or store): nothing of "
                    "them is reused, and its best trial may be one of them. Use another study_name to keep them apart.",
                    name,
                )
                return

    def _continues(self, started: SearchStarted, ended: bool, proposed: Iterable[TrialProposed]) -> bool:
        mine = self._started
        same = (started.algorithm, started.metric, started.steps, started.n_trials, started.sampler) == (
            mine.algorithm,
            mine.metric,
            mine.steps,
            mine.n_trials,
            mine.sampler,
        )
        if ended or not same:
            return False
        # An in-memory study does not outlive its process; the plan does. Then the search begins anew.
        numbers = {trial.number for trial in self.study.get_trials(deepcopy=False)}
        return all(proposal.number is None or proposal.number in numbers for proposal in proposed)

    def _propose(self) -> None:
        while not self._stopping and self._more() and self._search.room() > 0:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                return
            trial = self.study.ask()
            trial.set_user_attr("hpstage:search", self._started.study)
            try:
                schedules = self._describe(trial)
            except Exception:
                self.study.tell(trial, state=TrialState.FAIL)
                raise
            if not self.trials:
                try:
                    self._before_first({name: schedule.value(0) for name, schedule in schedules.items()})
                except Exception:
                    _withdraw(self.study, self.study.get_trials(deepcopy=False)[trial.number])
                    raise
            added = TrialAdded(TrialId(f"{self.study.study_name}/{trial.number}"), schedules, self._started.steps)
            proposed = TrialProposed(self._started.study, trial.number, added.trial, self._sampler.take())
            self.driver.add([added], [proposed])
            entered = self._enter(trial.number, added.trial, trial, set())
            self._perform(self._search.added(entered.index))
            self._stopping |= self.study._stop_flag
        if not self._closed and (self._stopping or not self._more()):
            self._closed = True
            self._perform(self._search.closed())

    def _describe(self, trial: Trial) -> dict[str, Schedule]:
        described = self._space(trial)
        if not isinstance(described, Mapping):
            raise UsageError(
                f"space() returned {type(described).__name__}; return a dict of hyper-parameter names to schedules or "
                f"values"
            )
        schedules = {}
        for name, value in described.items():
            if not isinstance(name, str):
                raise UsageError(f"space() returned the name {name!r}; names of hyper-parameters are strings")
            try:
                schedules[name] = as_schedule(value)
            except UsageError as error:
                raise type(error)(f"trial {trial.number}, hyper-parameter {name!r}: {error}") from None
        steps = self._started.steps
        check_trial(schedules, steps, f"trial {trial.number}")
        return {name: schedule.until(steps) for name, schedule in schedules.items()}

    def _enter(self, number: int, id: TrialId, trial: Trial | None, reported: set[int]) -> SessionTrial:
        entered = SessionTrial(len(self.trials), number, id, trial, reported=reported)
        self.trials.append(entered)
        self._by_id[id] = entered
        self.finished += entered.finished
        return entered

    # --- telling ------------------------------------------------------------------------------------------

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            trial = self.trials[action.index]
            match action:
                case Ask(_, step):
                    self._asked.append((trial.index, step))
                    if trial.finished and not self.driver.knows(trial.id, step):
                        # Told as failed by the call that was interrupted.
                        failure = UserFailure(summary="failed in an earlier session", traceback="")
                        self._known[trial.index, step] = Answer(trial.id, step, None, failure)
                    else:
                        self.driver.ask(trial.id, step)
                case Finish(_, state):
                    self._finish(trial, TrialState.COMPLETE if state == "complete" else TrialState.PRUNED)

    def _tell(self) -> None:
        """Tell the algorithm what is known: in the order of asking if it is synchronous, else as it comes."""
        if self._synchronous:
            while self._asked and self._asked[0] in self._known:
                self._tell_one(self._asked.popleft())
                # Before the next result is told: what a proposal knows must not hang on what came in together.
                self._propose()
        else:
            for target in list(self._known):
                self._asked.remove(target)
                self._tell_one(target)

    def _tell_one(self, target: tuple[int, int]) -> None:
        index, step = target
        trial, answer = self.trials[index], self._known.pop(target)
        failure = answer.failure
        if answer.metrics is not None:
            if self._started.metric not in answer.metrics:
                raise UsageError(missing_metric(self._started.metric, answer.metrics))
            value = answer.metrics[self._started.metric]
            if not math.isnan(value):
                trial.value = value
                if trial.optuna is not None and step not in trial.reported:
                    trial.reported.add(step)
                    trial.optuna.report(value, step)
                self._perform(self._search.told(index, step, value))
                return
            # As in Optuna: the trial fails, and the study goes on whatever `catch` says.
            failure = UserFailure(summary=f"{self._started.metric} is NaN at step {step}", traceback="")
        assert failure is not None
        self.failed += 1
        self._warn(trial, failure)
        if trial.optuna is not None:
            trial.optuna.set_user_attr("hpstage:failure", failure.summary[:1000])
            trial.optuna.set_user_attr("hpstage:traceback", failure.traceback[-20000:])
            if failure.kinds and not any(kind in self._catch for kind in failure.kinds):
                self._raised = self._raised or failure
            self._finish(trial, TrialState.FAIL)
        self._perform(self._search.failed(index))

    def _warn(self, trial: SessionTrial, failure: UserFailure) -> None:
        """Say each failure once: many trials may fail of the same one."""
        if failure.traceback in self._warned and failure.traceback:
            return
        self._warned.add(failure.traceback)
        logger.warning("Trial %d failed: %s\n%s", trial.number, failure.summary, failure.traceback)

    def _finish(self, trial: SessionTrial, state: TrialState) -> None:
        if trial.optuna is None:
            return  # told in an earlier session
        value = trial.value if state == TrialState.COMPLETE else None
        frozen = self.study.tell(trial.optuna, value, state=state)
        trial.optuna = None
        self.finished += 1
        for callback in self._callbacks:
            callback(self.study, frozen)
        self._stopping |= self.study._stop_flag


def _withdraw(study: optuna.Study, trial: FrozenTrial) -> None:
    """Take back a trial that was proposed and never trained, so that what it stood for is proposed again."""
    ticks_off = (optuna.samplers.GridSampler, optuna.samplers.BruteForceSampler)
    if "fixed_params" not in trial.system_attrs and not isinstance(study.sampler, ticks_off):
        study.tell(trial.number, state=TrialState.FAIL)
    elif trial.state != TrialState.WAITING:
        # Queued by the user, or the only trial of its place in a finite space, whose failure would tick it off: the
        # same trial waits to be asked for again.
        study._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)


def missing_metric(metric: str, metrics: Mapping[str, float]) -> str:
    return (
        f"evaluate() returned {', '.join(map(repr, sorted(metrics))) or 'nothing'}, but metric={metric!r} was asked for"
    )
