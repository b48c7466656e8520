"""Exploration of population-based training: parameters are resampled or perturbed within their distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

T = TypeVar("T")


def explore(
    params: Mapping[str, tuple[Any, BaseDistribution]],
    *,
    perturbation_factors: Sequence[float],
    resample_probability: float,
    rng: Random,
) -> dict[str, Any]:
    """Return values for all of ``params``, each resampled with ``resample_probability`` and otherwise perturbed.

    Jaderberg et al., arXiv 1711.09846, section 4.1.1, *explore*: "resample" and "perturb". Parameters are treated
    independently; the result does not depend on their order in ``params``.

    Resampled: drawn from the parameter's distribution, as by Optuna's RandomSampler. Perturbed: multiplied by one of
    the factors, which are equally likely, and

    - clipped to the distribution's bounds, which Ray does not do;
    - for distributions with steps (including all integers): rounded to the nearest step, but moved by at least one
      step unless at the bound: up for a factor above 1, down for one below 1, the other way for negative values;
    - for a choice among numbers: not multiplied but replaced by the next larger number for a factor above 1,
      by the next smaller for one below 1, if there is one. Ray moves along the list as written, which is the same for
      sorted lists;
    - for any other choice: kept.

    A factor of 1 keeps a value, and any factor keeps a 0 if there are no steps.
    """
    explored = {}
    for name in sorted(params):
        value, distribution = params[name]
        if rng.random() < resample_probability:
            explored[name] = _drawn(distribution, rng)
        else:
            explored[name] = _perturbed(value, distribution, pick(perturbation_factors, rng))
    return explored


def pick(items: Sequence[T], rng: Random) -> T:
    """Return one of ``items``, all equally likely. Use only ``rng.random``, which Python guarantees not to change."""
    return items[int(rng.random() * len(items))]


def _drawn(distribution: BaseDistribution, rng: Random) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(distribution, CategoricalDistribution):
        return pick(distribution.choices, rng)
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high = distribution.low, distribution.high
    if distribution.log and isinstance(distribution, IntDistribution):
        # Extended by half a step at either end, so that rounding gives the bounds the same share as other numbers.
        return _clipped(round(_between(math.log(low - 0.5), math.log(high + 0.5), rng, exp=True)), low, high)
    if distribution.log:
        return _clipped(_between(math.log(low), math.log(high), rng, exp=True), low, high)
    if distribution.step is None:
        return _clipped(_between(low, high, rng, exp=False), low, high)
    return _at(distribution, int(rng.random() * (_last(distribution) + 1)))


def _perturbed(value: Any, distribution: BaseDistribution, factor: float) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(distribution, CategoricalDistribution):
        return _neighbour(value, distribution.choices, factor)
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    low, high, step = distribution.low, distribution.high, distribution.step
    if isinstance(distribution, FloatDistribution):
        value = float(value)  # Optuna proposes a NumPy float for tiny intervals; ours are plain
    scaled = _clipped(value * factor, low, high)
    if step is None:
        return float(scaled)
    before, after = round((value - low) / step), round((scaled - low) / step)
    if after == before and factor != 1:
        after += 1 if (factor > 1) == (value >= 0) else -1
    return value if after == before else _at(distribution, after)


def _neighbour(value: Any, choices: Sequence[Any], factor: float) -> Any:
    if factor == 1 or not all(_is_number(choice) for choice in choices):
        return value
    if factor > 1:
        return min((choice for choice in choices if choice > value), default=value)
    return max((choice for choice in choices if choice < value), default=value)


def _is_number(choice: object) -> bool:
    return isinstance(choice, int | float) and not isinstance(choice, bool) and not math.isnan(choice)


def _between(low: float, high: float, rng: Random, *, exp: bool) -> float:
    drawn = low + rng.random() * (high - low)
    return math.exp(drawn) if exp else drawn


def _last(distribution: FloatDistribution | IntDistribution) -> int:
    """Return the number of steps from the lower to the upper bound."""
    assert distribution.step is not None
    return round((distribution.high - distribution.low) / distribution.step)


def _at(distribution: FloatDistribution | IntDistribution, k: int) -> float:
    """Return the value ``k`` steps above the lower bound, clipped, bit for bit as Optuna's samplers propose it.

    If the floats differed, a trial with an explored value would share no training with a trial proposed with it.
    """
    assert distribution.step is not None
    return _clipped(k * distribution.step + distribution.low, distribution.low, distribution.high)


Number = TypeVar("Number", int, float)


def _clipped(value: Number, low: Number, high: Number) -> Number:
    return min(max(value, low), high)
