"""Functions for Optuna's private names, which no other file of hpstage uses.

They were reviewed and tested in Optuna 4.4.0 and 5.0.0. No public names exist for them: the storage id of a trial, a
storage that wraps a study's own, a trial whose values are drawn on suggestion.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, BinaryIO

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GridSampler
from optuna.storages import BaseStorage, InMemoryStorage, _CachedStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, Trial

__all__ = ["FrozenStudy"]  # a type: what storages return for a study

_METRIC_NAMES = "study:metric_names"
_OF_KERNEL = ("inverse_squared_lengthscales", "kernel_scale", "noise_var")


# --- studies and their trials ---------------------------------------------------------------------------------


def storage_of(study: optuna.Study) -> BaseStorage:
    return study._storage


def use_storage(study: optuna.Study, storage: BaseStorage) -> None:
    study._storage = storage


def id_of_study(study: optuna.Study) -> int:
    """Return the study's id in its storage."""
    return study._study_id


def has_study(storage: BaseStorage, study_id: int) -> bool:
    return any(study._study_id == study_id for study in storage.get_all_studies())


def id_of(trial: FrozenTrial | Trial) -> int:
    """Return the trial's id in its storage, which is not its number."""
    return trial._trial_id


def is_feasible(trial: FrozenTrial) -> bool:
    """Whether the trial satisfies its constraints, the sampler's or its own."""
    constraints = getattr(trial, "constraints", None)  # public since Optuna 5
    values = trial.system_attrs.get("constraints") or () if constraints is None else constraints.values()
    return all(value <= 0 for value in values)


def set_constraints(storage: BaseStorage, trial_id: int, values: Mapping[str, float]) -> None:
    """Set constraints of a trial, as ``trial.set_constraint`` does since Optuna 5, and as samplers did earlier."""
    if hasattr(Trial, "set_constraint"):
        for name, value in values.items():
            storage.set_trial_system_attr(trial_id, f"constraints:{name}", value)
    else:
        storage.set_trial_system_attr(trial_id, "constraints", list(values.values()))


def startup_trials(sampler: BaseSampler) -> int:
    """Return the number of trials that the sampler proposes at random before it learns."""
    return getattr(sampler, "_n_startup_trials", 0)


def name_objectives(study: optuna.Study, names: Sequence[str]) -> None:
    """Set the names of the objectives without a warning, unless the user has set them."""
    storage, id = study._storage, study._study_id
    if storage.get_study_system_attrs(id).get(_METRIC_NAMES) is None:
        storage.set_study_system_attr(id, _METRIC_NAMES, list(names))


def is_stopped(study: optuna.Study) -> bool:
    """Whether ``study.stop()`` was called since the study began to run."""
    return study._stop_flag


def set_stopped(study: optuna.Study, stopped: bool) -> None:
    study._stop_flag = stopped


def is_running(study: optuna.Study) -> bool:
    """Whether this thread is within ``study.optimize``, where ``study.stop()`` may be called."""
    return study._thread_local.in_optimize_loop


def set_running(study: optuna.Study, running: bool) -> None:
    study._thread_local.in_optimize_loop = running


def forget_trials(study: optuna.Study) -> None:
    """Have the sampler read the trials again, as ``study.ask`` does."""
    study._thread_local.cached_all_trials = None


class Forked(Trial):
    """A trial with given parameters. ``within(distribution, value)`` adapts each of them to the distribution from which
    it is suggested; if it returns ``None``, the sampler suggests the parameter."""

    def __init__(self, study: optuna.Study, trial_id: int, within: Callable[[BaseDistribution, Any], Any]) -> None:
        super().__init__(study, trial_id)
        self._within = within
        self._fixed_params = dict(self._fixed_params)

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        if name in self._fixed_params:
            value = self._within(distribution, self._fixed_params.pop(name))
            if value is not None:
                self._fixed_params[name] = value
        return super()._suggest(name, distribution)


class Drawn(optuna.trial.FixedTrial):
    """A trial of no study. ``draw`` returns the value of each parameter when it is first suggested."""

    def __init__(self, draw: Callable[[str, BaseDistribution], Any], number: int) -> None:
        super().__init__({}, number)
        self._draw = draw

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        if name not in self._params:
            self._params[name] = self._draw(name, distribution)
        return super()._suggest(name, distribution)


def contains(distribution: BaseDistribution, internal: float) -> bool:
    """Whether a value, in the representation of storages, is in the distribution."""
    return distribution._contains(internal)


# --- samplers -------------------------------------------------------------------------------------------------


def size_of(grid: GridSampler) -> int:
    return len(grid._all_grids)


def is_space_of(grid: GridSampler, search_space: Mapping[str, Any]) -> bool:
    """Whether a search space, as stored with a trial, is the grid's."""
    return grid._same_search_space(search_space)


def kernels_of(sampler: BaseSampler) -> dict[str, list[list[Any]]]:
    """Return the kernel parameters from which a ``GPSampler`` starts the fit for its next proposal."""
    kept = {name: value for name, value in vars(sampler).items() if "_cache" in name and value is not None}
    return {
        name: [
            [one.inverse_squared_lengthscales.tolist(), one.kernel_scale.item(), one.noise_var.item()] for one in all
        ]
        for name, all in kept.items()
    }


def set_kernels(sampler: BaseSampler, kernels: Mapping[str, Sequence[Sequence[Any]]]) -> None:
    """Restore what :func:`kernels_of` has returned. The sampler reads no other attributes of a kernel."""
    import torch

    for name, of_objectives in kernels.items():
        numbers = ([torch.tensor(number, dtype=torch.float64) for number in kernel] for kernel in of_objectives)
        vars(sampler)[name] = [SimpleNamespace(**dict(zip(_OF_KERNEL, kernel, strict=True))) for kernel in numbers]


# --- storages -------------------------------------------------------------------------------------------------


def behind(storage: BaseStorage) -> BaseStorage | None:
    """Return the database behind a storage that caches one; else ``None``."""
    return storage._backend if isinstance(storage, _CachedStorage) else None


def url_of_journal(storage: BaseStorage) -> object:
    """Return the URL of a journal on Redis; ``None`` for other storages."""
    return getattr(getattr(storage, "_backend", None), "_url", None)


def cut_torn_line(storage: BaseStorage) -> None:
    """Remove an incomplete line at the end of a journal's file, left by a failed write (a full disk, a power cut).

    Such a line was never acknowledged. Optuna would append to it, and could not read the file any more.
    """
    backend = getattr(storage, "_backend", None)
    if not isinstance(backend, JournalFileBackend):
        return
    with suppress(OSError), open(backend._file_path, "r+b") as file:  # the next reader or writer gets the error
        if not _is_torn(file):
            return
        backend._lock.acquire()
        try:
            if _is_torn(file):  # still, and so not because another process was writing
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        finally:
            backend._lock.release()


def _is_torn(file: BinaryIO) -> bool:
    size = file.seek(0, os.SEEK_END)
    if not size:
        return False
    file.seek(size - 1)
    return file.read(1) != b"\n"


def drop_from_memory(storage: InMemoryStorage, trial_id: int, names: Sequence[str], steps: Sequence[int]) -> None:
    """Remove user attributes and intermediate values of a trial. Trials that were read from the storage earlier do not
    change."""
    with storage._lock:
        trial = copy.copy(storage._get_trial(trial_id))
        trial.user_attrs = {name: value for name, value in trial.user_attrs.items() if name not in names}
        trial.intermediate_values = {at: value for at, value in trial.intermediate_values.items() if at not in steps}
        storage._set_trial(trial_id, trial)


def tables_of_trials() -> tuple[Any, Any]:
    """Return the database tables of the user attributes and the intermediate values of trials."""
    from optuna.storages._rdb.models import TrialIntermediateValueModel, TrialUserAttributeModel

    return TrialUserAttributeModel, TrialIntermediateValueModel


def table_of_attributes() -> Any:
    """Return the database table of the system attributes of studies."""
    from optuna.storages._rdb.models import StudySystemAttributeModel

    return StudySystemAttributeModel
