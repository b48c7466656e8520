"""Optuna's own conformance suites, passed by StageTreeSampler over several samplers, at radius 0 and as it comes."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import optuna
import pytest
from optuna.samplers import BaseSampler, CmaEsSampler, NSGAIISampler, RandomSampler, TPESampler

from hpstage.optuna import StageTreeSampler

pytest.importorskip("optuna.testing.pytest_samplers", reason="this version of Optuna ships no suites for pytest")

from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    MultiObjectiveSamplerTestCase,
    RelativeSamplerTestCase,
    SingleOnlySamplerTestCase,
)

# At radius 0 it is the base sampler, to the last bit: tests/unit/optuna/test_stage_tree_sampler.py.
RADII = [pytest.param({"radius": 0}, marks=pytest.mark.slow), {}]


def _tpe_group() -> BaseSampler:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(multivariate=True, group=True, n_startup_trials=2)


def _cma_es() -> BaseSampler:
    pytest.importorskip("cmaes")
    return CmaEsSampler(n_startup_trials=0)


INDEPENDENT: dict[str, Callable[[], BaseSampler]] = {
    "random": RandomSampler,
    "tpe-univariate": lambda: TPESampler(multivariate=False, n_startup_trials=2),
    "tpe-group": _tpe_group,  # the suite for relative samplers is not for it: its search space must be inferred first
    "nsga-ii": lambda: NSGAIISampler(population_size=4),
}
RELATIVE: dict[str, Callable[[], BaseSampler]] = {"tpe": lambda: TPESampler(n_startup_trials=0)}


@pytest.fixture(params=RADII, ids=["radius-0", "default-radius"])
def options(request: pytest.FixtureRequest) -> dict[str, float]:
    return request.param


class TestOverIndependentSamplers(BasicSamplerTestCase, MultiObjectiveSamplerTestCase):
    @pytest.fixture(params=list(INDEPENDENT.values()), ids=list(INDEPENDENT))
    def sampler(self, request: pytest.FixtureRequest, options: dict[str, float]) -> Callable[[], BaseSampler]:
        return lambda: StageTreeSampler(request.param(), **options)


class TestOverRelativeSamplers(BasicSamplerTestCase, RelativeSamplerTestCase, MultiObjectiveSamplerTestCase):
    @pytest.fixture(params=list(RELATIVE.values()), ids=list(RELATIVE))
    def sampler(self, request: pytest.FixtureRequest, options: dict[str, float]) -> Callable[[], BaseSampler]:
        return lambda: StageTreeSampler(request.param(), **options)


class TestOverCmaEs(BasicSamplerTestCase, SingleOnlySamplerTestCase):
    @pytest.fixture
    def sampler(self, options: dict[str, float]) -> Callable[[], BaseSampler]:
        return lambda: StageTreeSampler(_cma_es(), **options)
