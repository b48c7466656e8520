"""A pruner's decision that holds once it is made, whenever the process that made it is killed."""

from __future__ import annotations

import copy
from typing import Any

import optuna
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial

from hpstage.optuna import private

_DECIDED = "hpstage:decided"
"""The name of a trial's system attribute: the last decision of a pruner that sets attributes of its own."""


def decide(study: optuna.Study, trial: FrozenTrial) -> bool:
    """Return the pruner's decision on the trial, after its last report.

    ``SuccessiveHalvingPruner`` notes the rung that a trial has reached before it decides, and would decide for the next
    one if it were called again. So what a pruner sets on the trial is written after its decision.
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


class _Pending:
    """A storage wrapper that keeps system attributes set on one trial to itself, and shows them."""

    def __init__(self, storage: BaseStorage, trial: FrozenTrial) -> None:
        self._storage = storage
        self._id = private.id_of(trial)
        self.attributes: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

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
