"""The study's side of a search: every reading of an Optuna study and every writing to it, storages' absences included.

Optuna's public methods where they do; its storage's where they do not (a trial that starts out of another, a report
for a trial of an earlier process).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from hpstage.errors import StoreError

logger = logging.getLogger("hpstage")

T = TypeVar("T")

# Seconds for which a storage may be away: a restart of a server, a failover, a locked file.
_PATIENCE = 600.0
# Between two looks whether it is back; doubled from the first to the second.
_PAUSES = (0.05, 5.0)
# The share of it for which a storage that answers may refuse: a lock that is held, a connection that broke.
_REFUSALS = 0.1


class Ledger:
    """Reads and writes one study.

    A storage that is away is waited for, up to ``patience`` seconds: workers go on meanwhile.

    Raises:
        StoreError: from every method, when the storage stays away.
    """

    def __init__(self, study: optuna.Study, *, patience: float = _PATIENCE) -> None:
        self.study = study
        self._storage = study._storage
        self._patience = patience

    @property
    def name(self) -> str:
        return self.study.study_name

    @property
    def stopped(self) -> bool:
        """Was ``study.stop()`` called?"""
        return self.study._stop_flag

    def trials(self) -> list[FrozenTrial]:
        """All trials of the study, in the order of their numbers; not to be changed."""
        return self.patiently(lambda: self.study.get_trials(deepcopy=False))

    def trial(self, trial_id: int) -> FrozenTrial:
        """The trial as it stands."""
        return self.patiently(lambda: self._storage.get_trial(trial_id))

    # --- beginnings ---------------------------------------------------------------------------------------

    def propose(self) -> Trial:
        """A trial that the sampler fills when the space asks for parameters, or the next one in the queue."""
        return self.patiently(self.study.ask)

    def exhausted(self) -> bool:
        """Has the sampler of a finite space proposed all of it? It would go on with what is still being trained."""
        sampler = samplers(self.study)[-1]
        if isinstance(sampler, optuna.samplers.GridSampler):
            trials = self.trials()
            if len(trials) < len(sampler._all_grids):
                return False
            taken = {t.system_attrs["grid_id"] for t in trials if "grid_id" in t.system_attrs}
            return len(taken) >= len(sampler._all_grids)
        if isinstance(sampler, optuna.samplers.BruteForceSampler):
            trials = [trial for trial in self.trials() if trial.state == TrialState.RUNNING and trial.params]
            if not trials:
                return False
            # What it would do if this one were over: stop the study, if there is nothing left.
            stopped, self.study._stop_flag = self.study._stop_flag, False
            sampler.after_trial(self.study, trials[-1], TrialState.COMPLETE, [0.0] * len(self.study.directions))
            found, self.study._stop_flag = self.study._stop_flag, stopped
            return found
        return False

    def fork(self, params: Mapping[str, Any], attrs: Mapping[str, Any]) -> Trial:
        """A running trial whose parameters are given; what they leave open, the sampler fills."""
        template = create_trial(
            state=TrialState.RUNNING, system_attrs={"fixed_params": dict(params)}, user_attrs=dict(attrs)
        )
        return Trial(self.study, self._create(template))

    def carry_on(self, finished: FrozenTrial, attrs: Mapping[str, Any]) -> FrozenTrial:
        """A running trial that has all that a finished one has: Optuna's finished trials cannot be changed."""
        template = create_trial(
            state=TrialState.RUNNING,
            params=finished.params,
            distributions=finished.distributions,
            intermediate_values=finished.intermediate_values,
            user_attrs=dict(attrs),
        )
        return self.trial(self._create(template))

    def _create(self, template: FrozenTrial) -> int:
        return self.patiently(lambda: self._storage.create_new_trial(self.study._study_id, template_trial=template))

    # --- what becomes of them -----------------------------------------------------------------------------

    def note(self, trial_id: int, attrs: Mapping[str, Any]) -> None:
        """Set user attributes of a trial that is not finished."""
        for name, value in attrs.items():
            self.patiently(lambda name=name, value=value: self._storage.set_trial_user_attr(trial_id, name, value))  # type: ignore[misc]

    def report(self, trial_id: int, step: int, value: float) -> None:
        """Set the intermediate value at ``step``."""
        self.patiently(lambda: self._storage.set_trial_intermediate_value(trial_id, step, float(value)))

    def should_prune(self, trial_id: int) -> bool:
        """The pruner's word on the trial, after its last report."""
        return self.patiently(lambda: self.study.pruner.prune(self.study, self._storage.get_trial(trial_id)))

    def finish(self, number: int, values: Sequence[float] | None, state: TrialState) -> FrozenTrial:
        """End a running trial; one that was ended by an attempt whose answer got lost stays as it is."""
        return self.patiently(lambda: self.study.tell(number, values, state=state, skip_if_finished=True))

    def withdraw(self, trial: FrozenTrial) -> None:
        """Take back a trial that was proposed and never trained, so that what it stood for is proposed again."""
        ticks_off = (optuna.samplers.GridSampler, optuna.samplers.BruteForceSampler)
        grown = trial.user_attrs.keys() & {"hpstage:donor", "hpstage:extends"}  # made again by whoever made it
        queued = "fixed_params" in trial.system_attrs
        if grown or not (queued or isinstance(samplers(self.study)[-1], ticks_off)):
            self.finish(trial.number, None, TrialState.FAIL)
        elif trial.state != TrialState.WAITING:
            # Queued by the user, or the only trial of its place in a finite space, whose failure would tick it off:
            # the same trial waits to be asked for again.
            self.patiently(lambda: self._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING))

    # --- absences -----------------------------------------------------------------------------------------

    def patiently(self, work: Callable[[], T]) -> T:
        """Do ``work``, which uses the storage, again until the storage is there. Errors of the user's are passed on."""
        began = None
        pause, longest = _PAUSES
        while True:
            try:
                done = work()
            except Exception as error:
                absence = self._absence()
                if absence is None and not _of_storage(error):
                    raise
                now = time.monotonic()
                if began is None:
                    began = now
                    logger.warning(
                        "The storage of the study does not answer (%s: %s); waiting for it. Training goes on.",
                        type(error).__name__,
                        error,
                    )
                if absence is None and now - began > _REFUSALS * self._patience:
                    raise  # it is there, and refuses this
                if now - began > self._patience:
                    raise StoreError(
                        f"the study's storage has been away for {now - began:.0f} s ({type(error).__name__}: {error}); "
                        f"all that was trained is kept: bring it back and run the same command again"
                    ) from error
                time.sleep(pause)
                pause = min(longest, 2 * pause)
            else:
                if began is not None:
                    logger.warning("The storage of the study is back after %.1f s.", time.monotonic() - began)
                return done

    def _absence(self) -> Exception | None:
        """What the storage answers to a question that every storage can answer, if it is an error."""
        try:
            self._storage.get_study_name_from_id(self.study._study_id)
        except Exception as error:
            return error
        return None


def samplers(study: optuna.Study) -> list[optuna.samplers.BaseSampler]:
    """The study's sampler and those within it, the one that proposes last."""
    chain = [study.sampler]
    while isinstance(inner := getattr(chain[-1], "base_sampler", None), optuna.samplers.BaseSampler):
        chain.append(inner)
    return chain


def _of_storage(error: Exception) -> bool:
    """May the error stem from the connection to a storage, and not from the user's code?"""
    home = type(error).__module__.partition(".")[0]
    return isinstance(error, optuna.exceptions.StorageInternalError) or home in ("redis", "sqlalchemy", "grpc")
