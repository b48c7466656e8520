"""The study of a search: all reads from and writes to an Optuna study.

Uses Optuna's public methods where possible and its storage's otherwise (a trial forked from another, a report for a
trial of an earlier process).
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from math import inf, isnan
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, check_distribution_compatibility
from optuna.exceptions import UpdateFinishedTrialError
from optuna.samplers import BruteForceSampler, GridSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from hpstage.errors import StoreError, UsageError
from hpstage.optuna import private
from hpstage.optuna.attributes import drop_brought, study_identity
from hpstage.optuna.influence import within
from hpstage.optuna.wrapped import BecameAnother, ProposedAgain, Wrapped, decide, is_note

logger = logging.getLogger("hpstage")

# Attributes that a grid sampler sets on its trials, and their values for a trial that is not a point of the grid.
_OF_GRID = ("grid_id", "search_space")
_NO_POINT: Mapping[str, Any] = {"grid_id": -1, "search_space": {}}


# User attributes of trials that an algorithm or an extension derives from others.
_GROWN = {"hpstage:donor", "hpstage:extends"}
_NO_ATTRS: Mapping[str, Any] = {}
_TAKEN = "hpstage:taken:"

Constraints = Callable[[Mapping[str, float]], Mapping[str, float]]

Callback = Callable[[optuna.Study, FrozenTrial], None]


def _mark(attrs: Mapping[str, Any]) -> str:
    """Return the name of the system attribute with which a search marks the queued trials that it takes. Its value is
    the trial's number."""
    return _TAKEN + "/".join(map(str, attrs.values()))


def _was_queued(trial: FrozenTrial) -> bool:
    notes = trial.system_attrs
    return "fixed_params" in notes or any(n.startswith(_TAKEN) and notes[n] == trial.number for n in notes)


class _Noting(Wrapped):
    """A storage wrapper that records the names of attributes that are set (constraints and artifacts are system
    attributes), and explains why a parameter is refused."""

    def __init__(self, storage: BaseStorage, noted: dict[str, None], ledger: Ledger) -> None:
        super().__init__(storage)
        self._noted = noted
        self._ledger = ledger

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._storage.set_trial_user_attr(trial_id, key, value)
        self._noted[key] = None

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._storage.set_trial_system_attr(trial_id, key, value)
        self._noted[key] = None

    def set_trial_param(self, trial_id: int, name: str, value: float, distribution: BaseDistribution) -> None:
        try:
            self._storage.set_trial_param(trial_id, name, value, distribution)
        except ValueError:
            self._ledger.check_compatible({name: distribution})
            raise


class Ledger:
    """Reads and writes one study.

    Args:
        constraints: as for ``hpstage.optimize``.
    """

    def __init__(self, study: optuna.Study, constraints: Constraints | None = None) -> None:
        self.study = study
        self._constraints = constraints
        self.taken: set[int] = set()
        """Numbers of the search's trials. If somebody else sets one of them to WAITING, it waits for the next call."""
        self._withdrawn: deque[FrozenTrial] | None = None
        self._ignores_reports = False

    @property
    def name(self) -> str:
        return self.study.study_name

    @property
    def _storage(self) -> BaseStorage:
        return private.storage_of(self.study)

    @property
    def is_stopped(self) -> bool:
        """Whether ``study.stop()`` was called since :meth:`take_stop`."""
        return private.is_stopped(self.study)

    def take_stop(self) -> bool:
        """Return whether ``study.stop()`` was called since the last call of this method."""
        stopped = private.is_stopped(self.study)
        private.set_stopped(self.study, False)
        return stopped

    def identity(self) -> str:
        """Return a string that is unique to the study, whatever its name; assigned when it is first requested."""
        return study_identity(self._storage, private.id_of_study(self.study))

    def name_objectives(self, names: Sequence[str]) -> None:
        """Name the study's objectives for Optuna's plots, data frames and dashboard, unless the user has named them."""
        private.name_objectives(self.study, names)

    def trials(self) -> list[FrozenTrial]:
        """Return all trials of the study, in the order of their numbers. They must not be modified."""
        return self.study.get_trials(deepcopy=False)

    def trial(self, storage_id: int) -> FrozenTrial:
        """Return the current state of the trial. It must not be modified."""
        with self._there():
            return self._storage.get_trial(storage_id)

    @contextmanager
    def _there(self) -> Iterator[None]:
        """Raise :class:`StoreError` if the trial is not in the storage."""
        try:
            yield
        except KeyError as error:
            raise self._deleted() from error

    def _deleted(self) -> StoreError:
        return StoreError(
            f"a trial of study {self.name!r} was deleted from its storage while it was searched; all that was "
            f"trained is kept: with a new study on the same store, none of it is trained again"
        )

    @contextmanager
    def optimize_loop(self) -> Iterator[None]:
        """Let callbacks and samplers call ``study.stop()``, as within ``study.optimize``."""
        if private.is_running(self.study):
            raise UsageError("optimize() was called from within a running study; nested searches are not possible")
        private.set_running(self.study, True)
        private.set_stopped(self.study, False)
        try:
            yield
        finally:
            private.set_running(self.study, False)

    # --- creating trials ----------------------------------------------------------------------------------

    def propose(self, attrs: Mapping[str, Any]) -> Trial:
        """Return a new trial whose parameters the sampler suggests, or the next one in the queue.

        Like ``study.ask()``, except that a new trial has its attributes, and a queued trial a mark of this search,
        before the trial is running. If this process dies here, the next one recognizes the trial by them.
        """
        private.forget_trials(self.study)
        mark = _mark(attrs)
        for queued in self._queue():
            queued_id = private.id_of(queued)
            with suppress(UpdateFinishedTrialError):  # another process has it, and may have ended it
                self._storage.set_trial_system_attr(queued_id, mark, queued.number)
                if self._storage.set_trial_state_values(queued_id, TrialState.RUNNING):
                    self.own(queued_id, attrs)
                    return Trial(self.study, queued_id)
                self._storage.set_trial_system_attr(queued_id, mark, None)
        return Trial(self.study, self._create(user_attrs=dict(attrs)))

    def own(self, storage_id: int, attrs: Mapping[str, Any]) -> FrozenTrial:
        """Take over a queued trial that this process has set to running: set these attributes, and remove hpstage's
        attributes and intermediate values that were copied from a retried trial. Return the trial."""
        brought = self.trial(storage_id)
        steps = list(brought.intermediate_values)  # of a retried trial that inherits them
        self.drop(storage_id, [name for name in brought.user_attrs if name.startswith("hpstage:")], steps)
        self.note(storage_id, attrs)
        return self.trial(storage_id)

    def is_taken_by(self, trial: FrozenTrial, attrs: Mapping[str, Any]) -> bool:
        """Whether a running trial was taken by the search with these attributes: it has them, or the search's mark."""
        return attrs.items() <= trial.user_attrs.items() or trial.system_attrs.get(_mark(attrs)) == trial.number

    def _withdrawn_first(self) -> list[FrozenTrial]:
        """Return the first of the trials that were waiting when this call began and still are, if any. Optuna's
        in-memory storage may omit trials withdrawn by an earlier call when it lists trials by state."""
        if self._withdrawn is None:
            self._withdrawn = deque(self._waiting(self.trials()))
        while self._withdrawn and not self._waiting([self.trial(private.id_of(self._withdrawn[0]))]):
            self._withdrawn.popleft()
        return [self._withdrawn[0]] if self._withdrawn else []

    def _queue(self) -> list[FrozenTrial]:
        """Return the queued trials, the next one first. A trial may be in the list twice."""
        waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        return [*self._withdrawn_first(), *self._waiting(waiting)]

    def _waiting(self, trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
        return [trial for trial in trials if trial.state == TrialState.WAITING and trial.number not in self.taken]

    def enqueue(
        self,
        points: Sequence[Mapping[str, Any]],
        distributions: Mapping[str, BaseDistribution],
        counts: Callable[[FrozenTrial], bool],
    ) -> None:
        """Queue a trial for each point, unless the study already has a trial with these parameters that is queued, or
        that has not failed and for which ``counts`` returns true.

        Raises:
            UsageError: the study has a trial with an incompatible distribution of a parameter.
        """
        self.check_compatible(distributions)
        there = [
            trial.system_attrs.get("fixed_params", trial.params)
            for trial in self.trials()
            if trial.state == TrialState.WAITING or (trial.state != TrialState.FAIL and counts(trial))
        ]
        for point in points:
            if point not in there:
                self.study.enqueue_trial(dict(point))

    def check_compatible(self, distributions: Mapping[str, BaseDistribution]) -> None:
        """Raise :class:`UsageError` if a trial of the study has an incompatible distribution of a parameter, such as
        other choices."""
        wanted = dict(distributions)
        for trial in self.trials():
            for name in trial.distributions.keys() & wanted.keys():
                try:
                    check_distribution_compatibility(trial.distributions[name], wanted.pop(name))
                except ValueError as error:
                    raise UsageError(
                        f"{name!r} is {trial.distributions[name]} in trial {trial.number} of study {self.name!r}, but "
                        f"{distributions[name]} in the space. Use another study; on the same store, both share "
                        f"training"
                    ) from error

    def queue_is_empty(self) -> bool:
        return not self._queue()

    def exhausted(self) -> bool:
        """Whether the sampler has proposed every point of a finite space. It would otherwise repeat trials that are
        still running."""
        sampler = samplers(self.study)[-1]
        if not isinstance(sampler, GridSampler | BruteForceSampler):
            return False
        trials = self.trials()
        if self._waiting(trials):
            return False
        if isinstance(sampler, GridSampler):
            if len(trials) < private.size_of(sampler):
                return False
            points = (t.system_attrs for t in trials if all(name in t.system_attrs for name in _OF_GRID))
            taken = {notes["grid_id"] for notes in points if private.is_space_of(sampler, notes["search_space"])}
            return len(taken) >= private.size_of(sampler)
        running = [trial for trial in trials if trial.state == TrialState.RUNNING and trial.params]
        if not running:
            return False
        # Simulate the end of this trial: the sampler stops the study if nothing is left.
        stopped = self.take_stop()
        sampler.after_trial(self.study, running[-1], TrialState.COMPLETE, [0.0] * len(self.study.directions))
        found = self.take_stop()
        private.set_stopped(self.study, stopped)
        return found

    def fork(self, params: Mapping[str, Any], attrs: Mapping[str, Any]) -> Trial:
        """Create a running trial with the given parameters, clipped to the ranges that they are suggested in. The
        sampler suggests any others."""
        notes = {"fixed_params": dict(params)}
        if isinstance(samplers(self.study)[-1], GridSampler):
            notes |= _NO_POINT
        return private.Forked(self.study, self._create(system_attrs=notes, user_attrs=dict(attrs)), within)

    def carry_on(
        self, finished: FrozenTrial, attrs: Mapping[str, Any], measured: Set[str], noted: Set[str]
    ) -> FrozenTrial:
        """Create a running trial to extend a finished one, which Optuna does not allow to change. It gets the
        parameters, intermediate values, user attributes except the ``measured`` ones, and the system attributes that
        the space has ``noted`` (constraints and artifacts)."""
        attributes = finished.user_attrs.items()
        own = {name: v for name, v in attributes if not name.startswith("hpstage:") and name not in measured}
        made = self._create(
            params=finished.params,
            distributions=finished.distributions,
            intermediate_values=finished.intermediate_values,
            user_attrs={**own, **attrs},
            system_attrs={name: v for name, v in finished.system_attrs.items() if name in _OF_GRID or name in noted},
        )
        return self.trial(made)

    def _create(self, **fields: Any) -> int:
        template = create_trial(state=TrialState.RUNNING, **fields)
        made = self._storage.create_new_trial(private.id_of_study(self.study), template_trial=template)
        if self.trial(made).number in self.taken:  # databases reuse the number of a deleted trial
            raise self._deleted()
        return made

    @contextmanager
    def noting(self, trial: Trial, noted: dict[str, None]) -> Iterator[None]:
        """Note the names of the attributes that the space sets on the trial in ``noted``. Values that the space reports
        are ignored, with one warning."""
        storage = trial.storage
        trial.storage = _Noting(storage, noted, self)  # type: ignore[assignment]
        hidden = {"report": self._ignore_report, "should_prune": self._ignore_report}
        vars(trial).update(hidden)
        try:
            yield
        finally:
            trial.storage = storage
            for name in hidden:
                vars(trial).pop(name, None)

    def _ignore_report(self, *_: object, **__: object) -> bool:
        if not self._ignores_reports:
            self._ignores_reports = True
            logger.warning(
                "trial.report() and trial.should_prune() in the space do nothing: the search reports the metrics of "
                "evaluate(); with algorithm=OptunaPruner(interval=...) the study's pruner decides"
            )
        return False

    # --- trials interrupted during creation ---------------------------------------------------------------

    def sampler_notes(self) -> dict[str, Any]:
        """Return the study attributes in which samplers keep numbers: the next index of a sequence, a generation."""
        attrs = self._storage.get_study_system_attrs(private.id_of_study(self.study))
        return {name: value for name, value in attrs.items() if is_note(value)}

    @contextmanager
    def proposing_again(self, cut_off: FrozenTrial, notes: Mapping[str, Any] | None) -> Iterator[Trial]:
        """Yield the trial without parameters, to be suggested again, and show samplers the study as it was when the
        trial was proposed.

        Args:
            notes: the :meth:`sampler_notes` at that time; ``None`` if they are not known.

        Raises:
            BecameAnother: the suggested parameters differ from those in the storage.
        """
        storage, id = self._storage, private.id_of(cut_off)
        private.use_storage(self.study, ProposedAgain(storage, cut_off, notes))  # type: ignore[arg-type]
        private.forget_trials(self.study)
        try:
            forked = "hpstage:donor" in cut_off.user_attrs
            trial = private.Forked(self.study, id, within) if forked else Trial(self.study, id)
            yield trial
            if cut_off.params.keys() - trial.params.keys():
                raise BecameAnother
        finally:
            private.use_storage(self.study, storage)
            private.forget_trials(self.study)

    def stand_in(self, trial: FrozenTrial, number: int) -> FrozenTrial:
        """Return a copy of a trial with which to call the space again: it suggests the same parameters, and has its
        original ``number``."""
        copied = copy.deepcopy(trial)
        copied.number = number
        copied.study = self.study  # type: ignore[attr-defined]
        return copied

    # --- updating trials ----------------------------------------------------------------------------------

    def note(self, storage_id: int, attrs: Mapping[str, Any]) -> None:
        """Set user attributes of a trial, unless somebody else has ended it."""
        with suppress(UpdateFinishedTrialError), self._there():
            for name, value in attrs.items():
                self._storage.set_trial_user_attr(storage_id, name, value)

    def drop(self, storage_id: int, names: Iterable[str], steps: Sequence[int] = ()) -> None:
        """Remove user attributes and intermediate values of a trial, unless somebody else has ended it."""
        with suppress(UpdateFinishedTrialError), self._there():
            drop_brought(self._storage, storage_id, names=list(names), steps=steps)

    def constrain(self, storage_id: int, metrics: Mapping[str, float]) -> None:
        """Set the constraints that the user's function computes from a trial's metrics, unless somebody else has ended
        the trial.

        Raises:
            UsageError: the function raises, or does not return a dict of numbers.
        """
        if self._constraints is None:
            return
        try:
            found = {str(name): float(value) for name, value in self._constraints(metrics).items()}
        except Exception as error:
            raise UsageError(
                f"constraints({dict(metrics)}) raises {type(error).__name__}: {error}; return a dict with one number "
                f"for each constraint, above 0 if it is violated"
            ) from error
        values = {name: inf if isnan(value) else value for name, value in found.items()}
        with suppress(UpdateFinishedTrialError), self._there():
            private.set_constraints(self._storage, storage_id, values)

    def report(self, storage_id: int, step: int, value: float) -> None:
        """Set the intermediate value at ``step``, unless somebody else has ended the trial."""
        with suppress(UpdateFinishedTrialError), self._there():
            self._storage.set_trial_intermediate_value(storage_id, step, float(value))

    def should_prune(self, storage_id: int) -> bool:
        """Return the pruner's decision on the trial, after its last report."""
        return decide(self.study, self.trial(storage_id))

    def claim(self, storage_id: int) -> FrozenTrial:
        """Set a trial running that was withdrawn to the queue. Return it."""
        self._storage.set_trial_state_values(storage_id, TrialState.RUNNING)
        return self.trial(storage_id)

    def finish(self, number: int, values: Sequence[float] | None, state: TrialState) -> FrozenTrial:
        """End a running trial, unless somebody else has ended it or set it to WAITING."""
        try:
            return self.study.tell(number, values, state=state, skip_if_finished=True)
        except ValueError:
            trial = self.trials()[number]
            if trial.state != TrialState.WAITING:
                raise
            return trial

    def withdraw(self, trial: FrozenTrial, attrs: Mapping[str, Any] = _NO_ATTRS) -> TrialState:
        """Withdraw a trial that was proposed but has no value, so that it or its grid point is proposed again.
        Return its state. ``attrs`` are set on the trial if it ends by this."""
        ticks_off = isinstance(samplers(self.study)[-1], GridSampler | BruteForceSampler)
        grown = trial.user_attrs.keys() & _GROWN  # recreated by the algorithm or extension
        if grown or not (_was_queued(trial) or ticks_off):
            self.note(private.id_of(trial), attrs)
            return self.finish(trial.number, None, TrialState.FAIL).state
        if trial.state.is_finished():  # by somebody else
            return trial.state
        if trial.state != TrialState.WAITING:
            # The user has queued it, or it is the only trial of a point in a finite space, which a failure would mark
            # as done: the same trial waits to be proposed again.
            self._storage.set_trial_state_values(private.id_of(trial), TrialState.WAITING)
        return TrialState.WAITING


def samplers(study: optuna.Study) -> list[optuna.samplers.BaseSampler]:
    """Return the study's sampler and the samplers that it wraps, the innermost one, which proposes, last."""
    chain = [study.sampler]
    while isinstance(inner := getattr(chain[-1], "base_sampler", None), optuna.samplers.BaseSampler):
        chain.append(inner)
    return chain
