"""Wrappers of a study's storage, with which a process continues what a killed process had begun: one repeats a pruner's
decision unchanged, another proposes a trial again whose creation was cut off."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from hpstage.optuna import private

_DECIDED = "hpstage:decided"
"""The name of a trial's system attribute with the last decision of the pruner, if the pruner sets attributes itself."""


class Wrapped:
    """A storage wrapper: attributes that a subclass does not define are those of the storage."""

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def decide(study: optuna.Study, trial: FrozenTrial) -> bool:
    """Return the pruner's decision on the trial, after its last report.

    ``SuccessiveHalvingPruner`` stores the rung that a trial has reached before it decides, and would decide for the
    next rung if it were called again. The attributes that a pruner sets are therefore written after its decision.
    """
    storage, id = private.storage_of(study), private.id_of(trial)
    place = [trial.number, trial.last_step]
    decided = trial.system_attrs.get(_DECIDED)
    if decided is None or decided["at"] != place:
        pending = _Pending(storage, trial)
        private.use_storage(study, pending)  # type: ignore[arg-type]
        try:
            prunes = study.pruner.prune(study, trial)
        finally:
            private.use_storage(study, storage)
        if not pending.attributes:
            return prunes
        decided = {"at": place, "prunes": prunes, "attributes": pending.attributes}
        storage.set_trial_system_attr(id, _DECIDED, decided)
    for name, value in decided["attributes"].items():
        storage.set_trial_system_attr(id, name, value)
    return bool(decided["prunes"])


class _Pending(Wrapped):
    """A storage wrapper that holds back the system attributes set on one trial, but returns them with the trial."""

    def __init__(self, storage: BaseStorage, trial: FrozenTrial) -> None:
        super().__init__(storage)
        self._id = private.id_of(trial)
        self.attributes: dict[str, Any] = {}

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        if trial_id == self._id:
            self.attributes[key] = value
        else:
            self._storage.set_trial_system_attr(trial_id, key, value)

    def get_trial(self, trial_id: int) -> FrozenTrial:
        return self._shown(self._storage.get_trial(trial_id))

    def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Any = None) -> list[FrozenTrial]:
        trials = self._storage.get_all_trials(study_id, deepcopy=deepcopy, states=states)
        return [self._shown(trial) for trial in trials] if self.attributes else trials

    def _shown(self, trial: FrozenTrial) -> FrozenTrial:
        if private.id_of(trial) != self._id:
            return trial
        shown = copy.copy(trial)
        shown.system_attrs = {**trial.system_attrs, **self.attributes}
        return shown


# System attributes that a trial has before its sampler is called: if it was queued, or forked in a study with a grid.
_OF_GRID = ("grid_id", "search_space")
_GIVEN, _OF_FORK = ("fixed_params",), ("fixed_params", *_OF_GRID)


class BecameAnother(BaseException):
    """A trial that is proposed again is not the same. No ``Exception``, so that the user's space does not catch it."""


class ProposedAgain(Wrapped):
    """A storage wrapper that hides what the first proposal of a trial has written, until it is written again.

    Samplers would otherwise learn from it: Optuna's GPSampler would take the trial for another running one,
    BruteForceSampler would avoid its point, and QMCSampler would proceed to the next point.

    Args:
        notes: the samplers' attributes of the study before the first proposal; ``None`` if they are unknown.

    Raises:
        BecameAnother: the trial gets other parameters than before, or another point of a grid. These are not written.
            Other attributes may differ: CmaEsSampler writes memory that it has not initialized.
    """

    def __init__(self, storage: BaseStorage, cut_off: FrozenTrial, notes: Mapping[str, Any] | None) -> None:
        super().__init__(storage)
        self._cut_off = cut_off
        self._id = private.id_of(cut_off)
        self._seen = copy.deepcopy(cut_off)
        self._seen.params, self._seen.distributions = {}, {}
        given = _OF_FORK if "hpstage:donor" in cut_off.user_attrs else _GIVEN
        self._seen.system_attrs = {name: value for name, value in cut_off.system_attrs.items() if name in given}
        self._notes = None if notes is None else dict(notes)

    # --- the trial ----------------------------------------------------------------------------------------

    def get_trial(self, trial_id: int) -> FrozenTrial:
        return copy.deepcopy(self._seen) if trial_id == self._id else self._storage.get_trial(trial_id)

    def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Any = None) -> list[FrozenTrial]:
        trials = self._storage.get_all_trials(study_id, deepcopy=deepcopy, states=states)
        return [copy.deepcopy(self._seen) if private.id_of(trial) == self._id else trial for trial in trials]

    def get_trial_system_attrs(self, trial_id: int) -> dict[str, Any]:
        return self.get_trial(trial_id).system_attrs

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        known = self._cut_off.system_attrs
        if trial_id == self._id:
            if key in _OF_GRID and known.get(key, value) != value:
                raise BecameAnother
            self._seen.system_attrs[key] = value
        self._storage.set_trial_system_attr(trial_id, key, value)

    def set_trial_param(self, trial_id: int, name: str, value: float, distribution: BaseDistribution) -> None:
        known = self._cut_off.distributions.get(name)
        if known is None:
            self._storage.set_trial_param(trial_id, name, value, distribution)
        elif known != distribution or known.to_internal_repr(self._cut_off.params[name]) != value:
            raise BecameAnother
        self._seen.params[name], self._seen.distributions[name] = distribution.to_external_repr(value), distribution

    # --- the study ----------------------------------------------------------------------------------------

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        attrs = self._storage.get_study_system_attrs(study_id)
        if self._notes is None:
            return attrs
        return {name: value for name, value in attrs.items() if not is_note(value)} | self._notes

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        if self._notes is None or not is_note(value):
            self._storage.set_study_system_attr(study_id, key, value)
            return
        self._notes[key] = value
        now = self._storage.get_study_system_attrs(study_id).get(key)
        if now is None or (isinstance(now, int) and now < value):  # else another process has set it
            self._storage.set_study_system_attr(study_id, key, value)


def is_note(value: object) -> bool:
    """Whether the value of a study's attribute is of a kind that Optuna's samplers store: a count, or trial numbers."""
    return type(value) is int or (isinstance(value, list) and all(type(item) is int for item in value))
