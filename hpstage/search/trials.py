"""The trials of a search: proposed by the sampler, forked by the algorithm, or continued from an earlier call."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.trial import FixedTrial, FrozenTrial, Trial, TrialState

from hpstage.algorithm import Fork, Trials
from hpstage.driver.driver import Driver
from hpstage.errors import ScheduleError, UsageError
from hpstage.execution.outcomes import failure_of
from hpstage.optuna.ledger import Ledger
from hpstage.optuna.private import id_of
from hpstage.optuna.sampler_state import SamplerState
from hpstage.optuna.wrapped import BecameAnother
from hpstage.plan.facts import (
    ForkedFrom,
    RandomState,
    SearchEnded,
    SearchStarted,
    TrialAdded,
    TrialId,
    TrialProposed,
    UserFailure,
    number_of,
)
from hpstage.plan.plan import SearchPlan
from hpstage.plan.searches import SearchRecord
from hpstage.schedule import space as spaces
from hpstage.schedule.space import Described, Rejected, check_forkable, describe, grown, points_of
from hpstage.search.earlier import PLAN, check_extension, check_metric, lengthened, warn_of_what_is_left
from hpstage.search.given import Given, branch_of
from hpstage.search.request import Request

# User attributes of a fork: the donor's number, and the step up to which it equals the donor.
_ORIGIN = ("hpstage:donor", "hpstage:forked_at")
_NOTHING: Mapping[str, Any] = {}
_NOTES = "study:notes"
"""The name under which samplers' attributes of the study are recorded, among their states."""
_SPACE_FILE = spaces.__file__


@dataclass(slots=True)
class SessionTrial:
    """A trial of a search: its identity in the study and in the plan, and its progress."""

    index: int
    number: int  # in the study
    storage_id: int
    id: TrialId
    origin: TrialId  # its id before it was extended, which identifies it as a donor
    fork: ForkedFrom | None = None
    state: TrialState = TrialState.RUNNING
    values: tuple[float, ...] | None = None
    metrics: Mapping[str, float] | None = None  # measured with the last values
    reported: set[int] = field(default_factory=set)
    attrs: dict[str, str] = field(default_factory=dict)  # user attributes that it gets with its end
    last_reported: int = 0  # the farthest step whose values the study and the algorithm know
    noted: frozenset[str] = frozenset()  # attributes that the space has set on it
    rejected: UserFailure | None = None  # by the space: it is not a trial of the algorithm
    barred: UserFailure | None = None  # why it cannot be trained further

    @property
    def finished(self) -> bool:
        return self.state.is_finished()


@dataclass(frozen=True, slots=True)
class _Made:
    """A trial of the study, and how the space described or rejected it."""

    trial: Trial
    noted: tuple[str, ...]
    """The attributes that the space has set."""
    described: Described | None = None
    """``None`` if it cannot be trained."""
    rejected: UserFailure | None = None


class Roster(Trials):
    """Creates the trials of a search, in both the study and the plan, and implements the look-ups of algorithms."""

    def __init__(
        self,
        request: Request,
        ledger: Ledger,
        driver: Driver,
        started: SearchStarted,
        before_first: Callable[[Described], Set[str]],
    ) -> None:
        self.trials: list[SessionTrial] = []
        self.by_id: dict[TrialId, SessionTrial] = {}
        self.stopped = False  # whether the space has stopped the study in an earlier call
        self.proposed = 0  # number of trials proposed by the sampler
        self.unclaimed: list[SessionTrial] = []  # forks of an earlier call not yet recreated by the algorithm
        self.metrics: Set[str] = frozenset()  # names of the metrics, found before the first trial was trained
        self._cut_off: list[FrozenTrial] = []  # trials that an earlier call created but did not write into the plan
        self._ledger = ledger
        self._driver = driver
        self._started = started
        self._space, self._catch = request.space, request.catch
        self._forks = request.algorithm.forks
        self._observed = request.observed
        self._before_first = before_first
        self._space_works = request.space_works  # else its exceptions are raised, and do not reject single trials
        self._sampler = SamplerState(ledger.study.sampler)
        self._notes: dict[str, Any] | None = None  # samplers' attributes of the study, as recorded so far
        # A plan with sharing, which shows the steps that trials have in common: the plan itself if it shares.
        self._shared = driver.plan if driver.plan.sharing else SearchPlan(driver.plan.workload)

    # --- beginning ----------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Start a search, or continue the trials of an interrupted or extended one. Return whether there is a search
        to run."""
        if not self._begin():
            return False
        if points := points_of(self._space):
            suggested = FixedTrial(points[0])
            self._space(suggested)  # type: ignore[arg-type]  # it has the same methods
            plan = self._driver.plan.id
            self._ledger.enqueue(points, suggested.distributions, lambda one: one.user_attrs.get(PLAN) == plan)
        known = {trial.number for trial in self.trials}
        for frozen in self._ledger.trials():
            ours = frozen.state == TrialState.RUNNING and self._ledger.is_taken_by(frozen, self._attrs())
            if ours and frozen.number not in known and self._id(frozen.number) not in self._driver.plan.trials:
                if frozen.user_attrs.get(PLAN) != self._driver.plan.id:  # cut off before it had its attributes
                    frozen = self._ledger.own(id_of(frozen), self._attrs())
                if frozen.intermediate_values:
                    self._ledger.withdraw(frozen)
                else:
                    self._cut_off.append(frozen)
        return True

    def exhausted(self) -> bool:
        """Whether all trials of a finite space were proposed, and none was cut off."""
        if self._cut_off_with(self._attrs()) is not None:
            return False
        return self._ledger.queue_is_empty() if points_of(self._space) else self._ledger.exhausted()

    def end(self) -> None:
        """Withdraw cut-off trials that were not recreated by the end of the search."""
        for frozen in self._cut_off:
            self._ledger.withdraw(frozen)
        self._cut_off.clear()

    def _id(self, number: int) -> TrialId:
        return TrialId(f"{self._started.study}/{number}")

    def _refuse_lost_trials(self) -> None:
        """Raise :class:`UsageError` if the plan has trials of the study that its storage does not have. New trials
        would get their numbers."""
        proposed = self._driver.plan.searches.proposed.items()
        numbers = {number_of(id) for id, one in proposed if one.study == self._started.study}
        if missing := numbers - {trial.number for trial in self._ledger.trials()}:
            raise UsageError(
                f"this store has trial {min(missing)} of study {self._ledger.name!r}, the study's storage does not. "
                f"Trials were deleted, or the storage is an older copy: continue with the storage that has all trials, "
                f"or copy the study under another name (optuna.copy_study(..., to_study_name=...)): on the same store, "
                f"nothing is trained again"
            )

    def _begin(self) -> bool:
        self._refuse_lost_trials()
        record, started = self._driver.plan.searches.get(self._started.study), self._started
        if record is not None and not isinstance(self._space, Given):
            check_metric(record, started, self._ledger)
        if record is not None and not record.ended and not started.continues and record.started.same_call(started):
            self._take_over(record, [])
            stops = any(proposed.stops for proposed in record.proposed)
            self.stopped = stops and not (started.extends or record.started.continues)
        elif started.extends or started.continues:
            if record is None:
                raise UsageError(
                    f"extend=True, but this store knows no search of study {self._ledger.name!r}; leave extend out to "
                    f"begin one"
                )
            check_extension(record.started, started)
            self._take_over(record, [started])
        else:
            listed = bool(points_of(self._space)) or isinstance(self._space, Given)
            warn_of_what_is_left(self._driver.plan, self._ledger, record, started, listed=listed)
            if started.n_trials == 0 and record is not None:
                return False  # an empty search must not replace the last one
            self._driver.log.write([started, TrialProposed(started.study, None, None, self._sampled())])
        return True

    def _take_over(self, record: SearchRecord, begin: list[SearchStarted]) -> None:
        """Continue with the trials of a search; ``begin`` holds the start of the search that extends it, if any."""
        by_number = {trial.number: trial for trial in self._ledger.trials()}
        trials = [(p, by_number[p.number]) for p in record.proposed if p.number is not None]
        longer = lengthened(
            self._driver.plan, self._ledger, self._space, self._started.steps, self._observed, self._catch, trials
        )
        self._driver.log.write(begin)
        for added in longer:
            self.plan(added)
        for proposed, frozen in trials:
            assert proposed.trial is not None
            if proposed.extends is None:
                id = proposed.trial
                trial = self._enter(SessionTrial(len(self.trials), frozen.number, 0, id, id, proposed.fork))
            else:
                trial = self.by_id[proposed.extends]
            self._ledger.taken.add(frozen.number)
            if frozen.state == TrialState.WAITING:  # study.stop() has withdrawn it
                frozen = self._ledger.claim(id_of(frozen))
            trial.id, trial.number, trial.storage_id = proposed.trial, frozen.number, id_of(frozen)
            # Without the values that a trial already had in the queue, which cannot be removed from a journal.
            reported = {step for step in frozen.intermediate_values if self._driver.knows(trial.id, step)}
            trial.state, trial.reported = frozen.state, reported
            trial.last_reported = max(trial.reported, default=0)
            self.by_id[trial.id] = trial
            trial.noted, trial.rejected = frozenset(proposed.noted), proposed.rejected
            self._space_works |= trial.id in self._driver.plan.trials or trial.rejected is not None
            if frozen.state == TrialState.FAIL or trial.id not in self._driver.plan.trials:
                trial.barred = trial.rejected or UserFailure(summary="failed in an earlier session", traceback="")
        self.unclaimed = [trial for trial in self.trials if trial.fork is not None]
        recorded = [proposed.sampler for proposed in record.proposed]
        self._sampler.put(recorded)
        for notes in (states[_NOTES] for states in recorded if _NOTES in states):
            self._notes = (self._notes or {}) | json.loads(str(notes))

    def _sampled(self) -> dict[str, RandomState | str]:
        """Return the sampler's state after a proposal, as far as it has changed."""
        states, notes = self._sampler.take(), self._ledger.sampler_notes()
        known = self._notes or {}
        if self._notes is None or notes != known:
            states[_NOTES] = json.dumps({name: note for name, note in notes.items() if note != known.get(name)})
            self._notes = notes
        return states

    def trial_ended(self) -> None:
        """Record changes of the sampler's state at the end of a trial."""
        if self._sampler.may_change_between and (states := self._sampler.take()):
            self._driver.log.write([TrialProposed(self._started.study, None, None, states)])

    # --- new trials ---------------------------------------------------------------------------------------

    def propose(self) -> SessionTrial:
        """Create a trial proposed by the sampler. The space may have rejected it."""
        made = self._make(self._attrs(), self._ledger.propose)
        if made.described is not None and not any(trial.rejected is None for trial in self.trials):
            try:
                self.metrics = self._before_first(made.described)
            except Exception:
                self._ledger.withdraw(self._ledger.trial(id_of(made.trial)))
                if not self.trials:  # an empty search, which no call should continue
                    self._driver.log.write([SearchEnded(self._started.study, time.time())])
                raise
            self._ledger.name_objectives(self._started.metric)  # now that the metrics are known to exist
        return self._add(made, None)

    def fork(self, fork: Fork, params: Mapping[str, Any]) -> SessionTrial:
        """Return the trial that an algorithm forks from another with ``params``, either new or made by an earlier
        call. The space may have rejected it."""
        donor = self.trials[fork.donor]
        forked = ForkedFrom(donor.origin, fork.step, {name: repr(value) for name, value in params.items()})
        for made in self.unclaimed:
            if made.fork == forked:
                self.unclaimed.remove(made)
                return made
        origin = dict(zip(_ORIGIN, (donor.number, fork.step), strict=True))
        new = self._make(self._attrs(origin), lambda attrs: self._ledger.fork(params, attrs), params)
        own = new.described
        if own is None:
            return self._add(new, forked)
        try:
            schedules = grown(self._driver.plan.trials[donor.id].schedules, fork.step, own.schedules)
        except ScheduleError as error:
            entered = self._add(replace(new, described=None), forked)
            entered.barred = UserFailure(summary=str(error), traceback="")
            return entered
        return self._add(replace(new, described=Described(schedules, own.steps, own.keep_at)), forked)

    def end_of(self, trial: SessionTrial, step: int) -> int:
        """Return ``step``, or the trial's last one if it ends before."""
        planned = self._driver.plan.trials.get(trial.id)
        return step if planned is None else min(step, planned.steps)

    def reach(self, trial: SessionTrial) -> int:
        """Return the farthest step of a trial that has a value or was requested."""
        return max([0, self._driver.plan.trials[trial.id].requested, *trial.reported])

    def carry_on(self, trial: SessionTrial) -> None:
        """Replace a finished trial by a new trial of the study that will get its longer result."""
        before = self._ledger.trial(trial.storage_id)
        origin = {name: before.user_attrs[name] for name in _ORIGIN if name in before.user_attrs}
        attrs = self._attrs({**origin, "hpstage:extends": trial.number})
        planned = self._driver.plan.trials[trial.id]
        state = self._driver.plan.known(trial.id, planned.answered) if planned.answered else None
        metrics = (state.metrics if state is not None else None) or {}
        frozen = self._cut_off_with(attrs)
        if frozen is None:
            frozen = self._ledger.carry_on(before, attrs, metrics.keys() - trial.noted, trial.noted)
        else:
            self._cut_off.remove(frozen)
        id = self._id(frozen.number)
        sampled = self._sampled()
        proposed = TrialProposed(
            self._started.study,
            frozen.number,
            id,
            sampled,
            trial.fork,
            extends=trial.id,
            params=_written(frozen.params),
            noted=tuple(sorted(trial.noted)),
        )
        schedules, plateaus = dict(planned.schedules), dict(planned.plateaus)
        self.plan(TrialAdded(id, schedules, planned.steps, planned.keep_at, plateaus), [proposed])
        trial.id, trial.number, trial.storage_id, trial.state = id, frozen.number, id_of(frozen), frozen.state
        self.by_id[id] = trial

    def _attrs(self, more: Mapping[str, Any] = _NOTHING) -> dict[str, Any]:
        """Return the user attributes of a new trial, which identify it if its creation is interrupted."""
        return {"hpstage:search": self._started.study, PLAN: self._driver.plan.id, **more}

    def _cut_off_with(self, attrs: Mapping[str, Any], params: Mapping[str, Any] | None = None) -> FrozenTrial | None:
        for frozen in self._cut_off:
            noted = {name: v for name, v in frozen.user_attrs.items() if name.startswith("hpstage:") and v is not None}
            given = frozen.system_attrs.get("fixed_params", {})
            if attrs == noted and (params is None or _as_stored(params) == _as_stored(given)):
                return frozen
        return None

    def _make(
        self,
        attrs: Mapping[str, Any],
        make: Callable[[Mapping[str, Any]], Trial],
        params: Mapping[str, Any] | None = None,
    ) -> _Made:
        """Return a trial of the study, as the space describes or rejects it: the one whose creation was cut off in an
        earlier call if it can be recreated identically, else a new one.

        Args:
            params: the given parameters of a fork.
        """
        cut_off = self._cut_off_with(attrs, params)
        if cut_off is not None:
            self._cut_off.remove(cut_off)
            try:
                with self._ledger.proposing_again(cut_off, self._notes) as again:
                    return self._describe(again)
            except BecameAnother:
                self._ledger.withdraw(cut_off)
        return self._describe(make(attrs))

    def _describe(self, trial: Trial) -> _Made:
        noted: dict[str, None] = {}
        try:
            with self._ledger.noting(trial, noted):
                catch = self._catch if self._space_works else ()
                described = describe(self._space, trial, self._started.steps, catch=catch)
            self._space_works = True
            described = self._observed.by(described, f"trial {trial.number}")
            if self._forks:
                check_forkable(described, self._started.steps, trial.number)
        except Rejected as rejected:
            return _Made(trial, tuple(noted), rejected=failure_of(rejected.cause, _SPACE_FILE, {}))
        except Exception:
            self._ledger.drop(id_of(trial), self.metrics | {*self._started.metric} - noted.keys())
            self._ledger.finish(trial.number, None, TrialState.FAIL)
            raise
        return _Made(trial, tuple(noted), described)

    def _add(self, made: _Made, fork: ForkedFrom | None) -> SessionTrial:
        """Write a trial into the plan, and return it."""
        trial, described = made.trial, made.described
        id = self._id(trial.number)
        proposed = TrialProposed(
            self._started.study,
            trial.number,
            id,
            self._sampled(),
            fork or branch_of(self._space, trial.number),
            params=_written(trial.params),
            noted=made.noted,
            rejected=made.rejected,
            stops=fork is None and self._ledger.is_stopped,
        )
        if described is not None:
            plateaus = dict(described.plateaus)
            self.plan(TrialAdded(id, described.schedules, described.steps, described.keep_at, plateaus), [proposed])
        else:
            self._driver.log.write([proposed])
        entered = SessionTrial(len(self.trials), trial.number, id_of(trial), id, id, fork)
        entered.noted, entered.rejected, entered.barred = frozenset(made.noted), made.rejected, made.rejected
        return self._enter(entered)

    def plan(self, added: TrialAdded, along: Sequence[TrialProposed] = ()) -> None:
        """Write a trial into the plan, or change its schedules beyond the steps requested of it."""
        self._driver.add([added], along)
        if self._shared is not self._driver.plan:
            self._shared.apply(added)

    def _enter(self, trial: SessionTrial) -> SessionTrial:
        self.trials.append(trial)
        self.by_id[trial.id] = trial
        self._ledger.taken.add(trial.number)
        self.proposed += trial.fork is None
        return trial

    # --- look-ups of the algorithm ------------------------------------------------------------------------

    def prefix(self, index: int, step: int) -> Hashable:
        trial = self.trials[index]
        planned = self._shared.trials.get(trial.id)
        if planned is None:
            return trial.id
        at = min(step, planned.steps)
        return planned.node_at(at).id, at

    def params(self, index: int) -> Mapping[str, tuple[Any, BaseDistribution]]:
        frozen = self._ledger.trial(self.trials[index].storage_id)
        return {name: (value, frozen.distributions[name]) for name, value in frozen.params.items()}

    def should_prune(self, index: int, step: int) -> bool:
        trial = self.trials[index]
        if any(later > step for later in trial.reported):
            return False  # as an earlier session decided, when the pruner knew less
        if trial.finished:
            return trial.state == TrialState.PRUNED
        return self._ledger.should_prune(trial.storage_id)


def _as_stored(params: Mapping[str, Any]) -> str:
    """Return parameters as storages write them, so that NaN equals NaN and a tuple equals a list."""
    return json.dumps(params, sort_keys=True, default=repr)


def _written(params: Mapping[str, Any]) -> dict[str, bool | int | float | str | None]:
    """Return an Optuna trial's parameters as JSON scalars, or their ``repr`` (infinities, other choices)."""
    written: dict[str, bool | int | float | str | None] = {}
    for name, value in params.items():
        match value:
            case None | bool() | str():
                written[name] = value
            case int() if -(2**63) <= value < 2**63:
                written[name] = int(value)
            case float() if isfinite(value):
                written[name] = float(value)  # NumPy floats are floats too
            case _:
                written[name] = repr(value)
    return written


def name_in(plan: SearchPlan, ledger: Ledger) -> str:
    """Return the study's name in the plan: its own, unless another study with that name was there first."""
    identity = ledger.identity()
    record = plan.searches.get(ledger.name)
    if record is None or record.started.identity == identity:
        return ledger.name
    return f"{ledger.name}@{identity[:8]}"
