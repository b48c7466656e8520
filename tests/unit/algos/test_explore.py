"""Exploring parameters: multiplied and resampled within their distributions, against Optuna's own sampling."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import optuna
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from hpstage.algos.explore import explore

optuna.logging.set_verbosity(optuna.logging.ERROR)

Params = Mapping[str, tuple[Any, BaseDistribution]]


@st.composite
def floats(draw: st.DrawFn) -> FloatDistribution:
    kind = draw(st.sampled_from(["plain", "log", "stepped"]))
    if kind == "log":
        low = draw(st.floats(1e-300, 1e300))
        return FloatDistribution(low, draw(st.floats(low, 1e305)), log=True)
    low = draw(st.floats(-1e300, 1e300) if kind == "plain" else st.integers(-1000, 1000).map(lambda n: n / 8))
    if kind == "plain":
        return FloatDistribution(low, draw(st.floats(low, 1e305)))
    step = draw(st.sampled_from([0.1, 0.125, 0.3, 1.0, 7.0]))
    high = Decimal(str(low)) + Decimal(str(step)) * draw(st.integers(0, 60))
    return FloatDistribution(low, float(high), step=step)


@st.composite
def ints(draw: st.DrawFn) -> IntDistribution:
    if draw(st.booleans()):
        low = draw(st.integers(1, 10**6))
        return IntDistribution(low, low + draw(st.integers(0, 10**6)), log=True)
    step = draw(st.integers(1, 50))
    low = draw(st.integers(-(10**6), 10**6) | st.integers(-60, 60))
    return IntDistribution(low, low + step * draw(st.integers(0, 60)), step=step)


def choices() -> st.SearchStrategy[CategoricalDistribution]:
    number = st.integers(-5, 5) | st.floats(-5, 5) | st.just(math.inf)
    anything = number | st.sampled_from([None, True, False, "adam", "sgd", math.nan])
    lists = st.lists(number, min_size=1, max_size=6) | st.lists(anything, min_size=1, max_size=6)
    return lists.map(CategoricalDistribution)


@st.composite
def proposals(draw: st.DrawFn, distributions: st.SearchStrategy[Any]) -> tuple[Any, BaseDistribution]:
    """A parameter as Optuna itself would propose it, or at one of the bounds."""
    distribution = draw(distributions)
    if isinstance(distribution, CategoricalDistribution):
        return draw(st.sampled_from(distribution.choices)), distribution
    bounds = [distribution.low, distribution.high]
    return draw(st.sampled_from(bounds) | st.integers(0, 999).map(lambda s: proposed(distribution, s))), distribution


def proposed(distribution: BaseDistribution, seed: int) -> Any:
    """What Optuna proposes for a random trial."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    return study.ask({"x": distribution}).params["x"]


def sample(distribution: BaseDistribution, seed: int, count: int) -> list[Any]:
    """What Optuna's own RandomSampler draws."""
    sampler = optuna.samplers.RandomSampler(seed=seed)
    study = optuna.create_study(sampler=sampler)
    study.ask()
    trial = study.trials[0]
    return [sampler.sample_independent(study, trial, "x", distribution) for _ in range(count)]


def explored(
    params: Params, seed: int = 0, factors: tuple[float, ...] = (0.8, 1.2), resample: float = 0.25
) -> dict[str, Any]:
    return explore(
        params, perturbation_factors=factors, resample_probability=resample, rng=random.Random(f"explore {seed}")
    )


def anything() -> st.SearchStrategy[tuple[Any, BaseDistribution]]:
    return proposals(floats() | ints() | choices())


FACTORS = st.sampled_from([0.01, 0.5, 0.8, 0.999, 1.0, 1.001, 1.2, 2.0, 1000.0])


@given(params=st.dictionaries(st.text(max_size=3), anything(), max_size=4), data=st.data())
def test_explored_values_lie_in_their_distribution_and_keep_their_type(params, data):
    factors = tuple(data.draw(st.lists(FACTORS, min_size=1, max_size=3)))
    found = explored(params, data.draw(st.integers(0, 99)), factors, data.draw(st.sampled_from([0.0, 0.5, 1.0])))
    assert found.keys() == params.keys()
    for name, (value, distribution) in params.items():
        assert distribution._contains(distribution.to_internal_repr(found[name]))
        if isinstance(distribution, CategoricalDistribution):
            assert any(found[name] is choice for choice in distribution.choices)
        else:
            # Optuna's own proposals are NumPy's floats where an interval is as small as the difference of two floats.
            kind = float if isinstance(distribution, FloatDistribution) else int
            assert type(found[name]) is kind and isinstance(value, kind)


@given(params=st.dictionaries(st.text(max_size=3), anything(), max_size=5), data=st.data())
@settings(max_examples=20)
def test_explored_values_do_not_depend_on_the_order_of_the_parameters(params, data):
    shuffled = {name: params[name] for name in data.draw(st.permutations(list(params)))}
    assert repr(sorted(explored(shuffled).items())) == repr(sorted(explored(params).items()))


@given(params=st.dictionaries(st.sampled_from("abcde"), anything(), min_size=1), seed=st.integers(0, 99))
def test_a_study_accepts_explored_values_as_a_queued_trial(params, seed):
    """Optuna warns, which fails the test, where a queued value lies outside of its distribution."""
    assume(all(value == value for value, _ in params.values()))
    found = explored(params, seed)
    study = optuna.create_study()
    study.enqueue_trial(found)
    trial = study.ask({name: distribution for name, (_, distribution) in params.items()})
    assert trial.params == found


@given(floats().filter(lambda d: d.step is None and not d.single()), st.integers(0, 999), FACTORS)
def test_an_explored_float_is_multiplied_by_the_factor_and_clipped_to_its_range(distribution, seed, factor):
    value = proposed(distribution, seed)
    expected = value * factor
    if expected < distribution.low:
        expected = distribution.low
    elif expected > distribution.high:
        expected = distribution.high
    assert explored({"x": (value, distribution)}, factors=(factor,), resample=0) == {"x": expected}


def moved(value: float, grid: list[float], factor: float) -> set[float]:
    """The rule for grids, by looking at every point: the nearest, but another one; where two are as near, either."""
    if factor == 1:
        return {value}
    distance = min(abs(point - value * factor) for point in grid)
    nearest = {point for point in grid if abs(point - value * factor) <= distance * (1 + 1e-9) + 1e-9}
    if value not in nearest:
        return nearest
    grows = factor > 1
    upward = grows if value >= 0 else not grows
    beyond = [point for point in grid if (point > value if upward else point < value)]
    step = {(min if upward else max)(beyond, default=value)}
    return step | (nearest - {value})


@given(proposals(ints().filter(lambda d: d.high - d.low <= 5000)), FACTORS)
@example((5, IntDistribution(1, 10)), 1.001)
@example((0, IntDistribution(-3, 3)), 1.2)
@example((0, IntDistribution(-3, 3)), 0.8)
@example((-1, IntDistribution(-3, 3)), 0.8)
@example((-2, IntDistribution(-4, 4, step=2)), 1.2)
def test_an_explored_integer_is_the_other_grid_point_nearest_to_the_multiplied_value(proposal, factor):
    value, distribution = proposal
    grid = list(range(distribution.low, distribution.high + 1, distribution.step))
    assert explored({"x": proposal}, factors=(factor,), resample=0)["x"] in moved(value, grid, factor)


@given(proposals(floats().filter(lambda d: d.step is not None)), FACTORS)
def test_an_explored_stepped_float_is_the_other_grid_point_nearest_to_the_multiplied_value(proposal, factor):
    value, distribution = proposal
    low, step = Decimal(str(distribution.low)), Decimal(str(distribution.step))
    count = int((Decimal(str(distribution.high)) - low) / step)
    grid = [float(low + k * step) for k in range(count + 1)]
    here = min(grid, key=lambda point: abs(point - value))
    found = explored({"x": proposal}, factors=(factor,), resample=0)["x"]
    assert min(grid, key=lambda point: abs(point - found)) in moved(here, grid, factor)


def test_explored_stepped_floats_are_exactly_floats_that_optuna_proposes():
    distribution = FloatDistribution(0.0, 1.0, step=0.1)
    samples = set(sample(distribution, 0, 500))
    assert len(samples) == 11
    found = {explored({"x": (v, distribution)}, seed)["x"] for seed in range(300) for v in (0.0, 1.0, 0.5)}
    assert found <= samples


@pytest.mark.parametrize(
    ("choices", "value", "smaller", "larger"),
    [
        ([64, 128, 256], 128, 64, 256),
        ([64, 128, 256], 64, 64, 128),
        ([64, 128, 256], 256, 128, 256),
        ([0.1, 0.05], 0.1, 0.05, 0.1),
        ([256, 64, 128], 256, 128, 256),
        ([1, 2.5, 2], 2, 1, 2.5),
        (["adam", "sgd", "lion"], "sgd", "sgd", "sgd"),
        ([1, 2, None], 2, 2, 2),
        ([1, 0, True], 1, 1, 1),
        ([1.0, 2.0, math.nan], 2.0, 2.0, 2.0),
    ],
)
def test_an_explored_choice_moves_to_a_neighbour_if_all_choices_are_numbers_and_else_stays(
    choices, value, smaller, larger
):
    params = {"x": (value, CategoricalDistribution(choices))}
    assert explored(params, factors=(0.8,), resample=0)["x"] == smaller
    assert explored(params, factors=(1.2,), resample=0)["x"] == larger
    assert {explored(params, seed, resample=0)["x"] for seed in range(50)} == {smaller, larger}


@pytest.mark.parametrize(
    ("value", "distribution"),
    [
        (3.0, FloatDistribution(3.0, 3.0)),
        (3.0, FloatDistribution(3.0, 3.0, log=True)),
        (3, IntDistribution(3, 3)),
        ("adam", CategoricalDistribution(["adam"])),
    ],
)
def test_exploring_a_parameter_with_one_possible_value_keeps_it(value, distribution):
    for seed in range(20):
        assert explored({"x": (value, distribution)}, seed, resample=0.5) == {"x": value}


@pytest.mark.parametrize(
    ("value", "distribution"),
    [
        (0.37, FloatDistribution(0.0, 1.0)),
        (0.3, FloatDistribution(0.0, 1.0, step=0.1)),  # three steps of 0.1 are another float
        (7, IntDistribution(1, 9, step=2)),
        (128, CategoricalDistribution([64, 128, 256])),
    ],
)
def test_exploring_with_a_factor_of_one_keeps_the_value(value, distribution):
    assert explored({"x": (value, distribution)}, factors=(1.0,), resample=0) == {"x": value}


def test_exploring_a_queued_value_outside_its_range_clips_it():
    assert explored({"x": (50, IntDistribution(1, 10))}, resample=0) == {"x": 10}
    assert explored({"x": (0.001, FloatDistribution(1.0, 2.0))}, resample=0) == {"x": 1.0}


DRAWN = [
    FloatDistribution(-3.0, 5.0),
    FloatDistribution(1e-5, 1e-1, log=True),
    FloatDistribution(0.0, 1.0, step=0.1),
    IntDistribution(-4, 9),
    IntDistribution(0, 100, step=5),
    IntDistribution(1, 200, log=True),
    CategoricalDistribution([0.1, 0.2, 0.3, 0.4, 0.5]),
    CategoricalDistribution(["adam", "sgd", "lion"]),
]


@pytest.mark.parametrize("distribution", DRAWN, ids=repr)
def test_resampled_values_have_the_distribution_of_optunas_random_sampler(distribution):
    count = 4000
    reference = [distribution.to_internal_repr(value) for value in sample(distribution, 1, count)]
    value, rng = proposed(distribution, 2), random.Random(3)
    mine = []
    for _ in range(count):
        params = {"x": (value, distribution)}
        value = explore(params, perturbation_factors=(1.2,), resample_probability=1.0, rng=rng)["x"]
        mine.append(distribution.to_internal_repr(value))
    points = sorted({*mine, *reference})
    counts, others = Counter(mine), Counter(reference)
    gap = below = other = 0
    for point in points:
        below, other = below + counts[point], other + others[point]
        gap = max(gap, abs(below - other))
    # Two-sample Kolmogorov-Smirnov, at 0.1 %.
    assert gap / count < 1.95 * math.sqrt(2 / count)


def test_parameters_are_resampled_and_multiplied_independently_with_the_given_probabilities():
    wide = FloatDistribution(-1e6, 1e6)
    params = {"a": (1.0, wide), "b": (2.0, wide)}
    rng, count = random.Random(7), 8000
    seen: Counter[tuple[str, str]] = Counter()
    for _ in range(count):
        found = explore(params, perturbation_factors=(0.8, 1.2), resample_probability=0.25, rng=rng)
        ratios = (found["a"] / 1.0, found["b"] / 2.0)
        seen[tuple({0.8: "down", 1.2: "up"}.get(ratio, "resampled") for ratio in ratios)] += 1
    share = {"down": 0.375, "up": 0.375, "resampled": 0.25}
    for a, chance in share.items():
        for b, other in share.items():
            expected = count * chance * other
            assert abs(seen[a, b] - expected) < 4 * math.sqrt(expected), (a, b)
