"""Create samplers by name, and list values that a sampler proposes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import optuna

from hpstage.errors import UsageError
from hpstage.errors.arguments import SEED
from hpstage.optuna.stand_in import described_trials, quiet_optuna
from hpstage.schedule import Scalar
from hpstage.schedule.space import Space

Catch = tuple[type[Exception], ...]

Sampler = Literal["random", "tpe", "grid", "bruteforce", "cmaes", "gp", "nsgaii", "nsgaiii", "qmc"]
SamplerName: TypeAlias = Sampler | str
"""The name of one of Optuna's samplers, also of one that a later version of Optuna has."""


def named_sampler(
    name: SamplerName, space: Space, steps: int, seed: int, *, catch: Catch = (Exception,)
) -> optuna.samplers.BaseSampler:
    """Return Optuna's sampler of this name, with or without ``Sampler``, in any case: ``"tpe"``, ``"CmaEsSampler"``.

    ``"grid"`` covers all choices of the first trial that the space does not reject by an exception in ``catch``.

    Raises:
        UsageError: there is no such sampler, the seed is not valid for NumPy, the sampler needs more than a seed, or
            the space has no grid.
    """
    SEED.of("seed", seed)
    known = {kind.removesuffix("Sampler").lower(): kind for kind in optuna.samplers.__all__ if kind.endswith("Sampler")}
    known.pop("base", None)
    plain = name.lower().removesuffix("sampler").replace("-", "").replace("_", "")
    if plain not in known:
        raise UsageError(f"sampler is {name!r}; give one of {', '.join(sorted(known))}")
    if plain == "grid":
        return optuna.samplers.GridSampler(_grid(space, steps, catch), seed=seed)
    kind = getattr(optuna.samplers, known[plain])
    try:
        return kind(seed=seed) if "seed" in inspect.signature(kind).parameters else kind()  # type: ignore[no-any-return]
    except TypeError as error:
        raise UsageError(f"{known[plain]} needs more than a seed ({error}); pass a sampler object instead") from error


def _grid(space: Space, steps: int, catch: Catch) -> Mapping[str, Sequence[str | int | float | bool | None]]:
    with quiet_optuna():
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    ((trial, _),) = described_trials(study, space, steps, 1, cut=False, catch=catch)
    grid: dict[str, Sequence[str | int | float | bool | None]] = {}
    for name, distribution in trial.distributions.items():
        match distribution:
            case optuna.distributions.CategoricalDistribution(choices=choices):
                grid[name] = choices
            case optuna.distributions.IntDistribution(low=low, high=high, step=step, log=False):
                grid[name] = range(low, high + 1, step)
            case optuna.distributions.FloatDistribution(low=low, high=high, step=step) if step is not None:
                grid[name] = [low + index * step for index in range(round((high - low) / step) + 1)]
            case _:
                raise UsageError(f"{name!r} has no grid; make it categorical, give it a step, or use another sampler")
    return grid


def values_met(space: Space, steps: int, *, sampler: optuna.samplers.BaseSampler, most: int) -> list[dict[str, Scalar]]:
    """Return the sets of values at the starts of stages of a search's first trials, at most ``most`` sets."""
    with quiet_optuna():
        study = optuna.create_study(sampler=copy.deepcopy(sampler))
    found: dict[tuple[tuple[str, Scalar], ...], None] = {}
    for _, described in described_trials(study, space, steps, most, cut=False, catch=(Exception,)):
        schedules = described.schedules
        starts = {start for schedule in schedules.values() for start, _, _ in schedule.pieces()}
        for start in sorted(starts):
            found[tuple((name, schedule.value(start)) for name, schedule in sorted(schedules.items()))] = None
    return [dict(values) for values in list(found)[:most]]
