"""A study as it was when a trial was proposed, to propose that trial again after its creation was cut off."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from hpstage.optuna import private

# System attributes that a trial has before its sampler is called: queued, or forked from another in a grid's study.
_OF_GRID = ("grid_id", "search_space")
_GIVEN, _OF_FORK = ("fixed_params",), ("fixed_params", *_OF_GRID)


class BecameAnother(BaseException):
    """A trial that is proposed again is not the same. Passes through whatever the user's space catches."""


class ProposedAgain:
    """A storage wrapper that hides what the proposal of a trial has written, until it is written again.

    Samplers learn from what they have written: Optuna's GPSampler would take the trial for another that is running,
    BruteForceSampler would avoid its point, and QMCSampler would proceed to the next one.

    Args:
        notes: what samplers had kept in the study's attributes before the proposal; ``None`` if that is unknown.

    Raises:
        BecameAnother: the trial gets other parameters than it has, or becomes another point of a grid. These are not
            written. Other attributes may differ: CmaEsSampler writes memory that it has not initialized.
    """

    def __init__(self, storage: BaseStorage, cut_off: FrozenTrial, notes: Mapping[str, Any] | None) -> None:
        self._storage = storage
        self._cut_off = cut_off
        self._id = private.id_of(cut_off)
        self._seen = copy.deepcopy(cut_off)
        self._seen.params, self._seen.distributions = {}, {}
        given = _OF_FORK if "hpstage:donor" in cut_off.user_attrs else _GIVEN
        self._seen.system_attrs = {name: value for name, value in cut_off.system_attrs.items() if name in given}
        self._notes = None if notes is None else dict(notes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

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
    """Whether a study's attribute is what Optuna's samplers keep there: a count, or numbers of trials."""
    return type(value) is int or (isinstance(value, list) and all(type(item) is int for item in value))
