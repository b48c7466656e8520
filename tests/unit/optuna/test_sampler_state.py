"""A resumed search proposes what it would have proposed, whoever's sampler it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial

import hpstage
from hpstage.algos import FullTraining
from hpstage.optuna.sampler_state import SamplerState
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape

optuna.logging.set_verbosity(optuna.logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


class Foreign(BaseSampler):
    """Proposes what ``draw`` gives."""

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        return self.draw(study, trial, param_name, param_distribution)

    def draw(self, *about: Any) -> float:
        raise NotImplementedError


class Generator(Foreign):
    def __init__(self, seed: int, bits: type[Any] = np.random.PCG64) -> None:
        self.rng = np.random.Generator(bits(seed))

    def draw(self, *about: Any) -> float:
        return float(self.rng.random())


class Python(Foreign):
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def draw(self, *about: Any) -> float:
        self.rng.gauss(0, 1)
        return self.rng.random()


class Counting(Foreign):
    def __init__(self, seed: int) -> None:
        self.count, self.last, self.by = seed, 0.5, {"step": 0.1, "turns": [0, 0]}

    def draw(self, *about: Any) -> float:
        self.count += 1
        self.by["turns"][self.count % 2] += 1  # type: ignore[index]
        self.last = (self.last + self.by["step"] * self.count + self.by["turns"][0]) % 1  # type: ignore[index, operator]
        return self.last


class Bandit(Foreign):
    """Takes turns between samplers that it keeps in a dict, one of them in a list."""

    def __init__(self, seed: int) -> None:
        self.arms = {"one": RandomSampler(seed=seed), "more": [Generator(seed), Python(seed)]}
        self.turn = 0

    def draw(self, *about: Any) -> float:
        self.turn += 1
        arms: list[Any] = [self.arms["one"], *self.arms["more"]]  # type: ignore[misc]
        return float(arms[self.turn % 3].sample_independent(*about))


class Wrapping(Foreign):
    """No attribute of it is what it draws from."""

    def __init__(self, seed: int) -> None:
        self.past = [0.1 * seed] * 100

    def draw(self, *about: Any) -> float:
        self.past.append((3.7 * self.past[-1] * (1 - self.past[-1])) % 1)
        return self.past[-1]


SAMPLERS: dict[str, Callable[[int], BaseSampler]] = {
    "generator": Generator,
    **{kind.__name__: lambda seed, kind=kind: Generator(seed, kind) for kind in (np.random.MT19937, np.random.Philox)},
    "SFC64": lambda seed: Generator(seed, np.random.SFC64),
    "python": Python,
    "counters": Counting,
    "bandit": Bandit,
    "partial": lambda seed: optuna.samplers.PartialFixedSampler({"b": 0.25}, Bandit(seed)),
}


def search(study: optuna.Study, journal: MemoryJournal, **options: Any) -> None:
    hpstage.optimize(
        study,
        Tape(),
        lambda trial: {"a": trial.suggest_float("a", 0, 1), "b": trial.suggest_float("b", 0, 1)},
        metric="score",
        steps=3,
        n_trials=8,
        algorithm=FullTraining(window=2),
        executor=hpstage.InlineExecutor(),
        store=journal,
        **options,
    )


@pytest.mark.parametrize("after", [1, 4, 6])
@pytest.mark.parametrize("name", SAMPLERS)
def test_another_process_goes_on_with_the_same_proposals(
    name: str, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(study: optuna.Study, trial: FrozenTrial) -> None:
        if trial.number == after:
            raise KeyboardInterrupt

    make = SAMPLERS[name]
    whole = optuna.create_study(sampler=make(3))
    search(whole, MemoryJournal())
    study, journal = optuna.create_study(sampler=make(3)), MemoryJournal()
    with pytest.raises(KeyboardInterrupt):
        search(study, journal, callbacks=[stop])
    study.sampler = make(4)
    search(study, journal)
    assert [trial.params for trial in study.trials] == [trial.params for trial in whole.trials]
    assert len({trial.params["a"] for trial in study.trials}) > 4
    assert "does not keep" not in caplog.text


def test_what_changes_and_is_not_kept_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    search(optuna.create_study(sampler=Wrapping(3)), MemoryJournal())
    assert caplog.text.count("Wrapping changes past, which the plan does not keep") == 1


def test_unchanged_numbers_are_not_written_again() -> None:
    sampler = Counting(0)
    state = SamplerState(sampler)
    assert state.take().keys() >= {"count", "last", "by['step']"}
    sampler.draw()
    assert state.take().keys() == {"count", "last", "by['turns'][1]"}
    assert state.take() == {}


def test_a_grid_of_many_points_is_not_looked_through() -> None:
    grid = optuna.samplers.GridSampler({"a": range(100), "b": range(100)}, seed=1)
    assert all("_all_grids" not in path for path in SamplerState(grid).take())
