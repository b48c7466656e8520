"""A resumed search proposes what it would have proposed, whoever's sampler it is."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial

import hpstage
from hpstage.algos import FullTraining
from hpstage.optuna.sampler_state import SamplerState
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape

optuna.logging.set_verbosity(optuna.logging.ERROR)
pytestmark = [pytest.mark.sampled(10), pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")]


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


class Slotted(Foreign):
    __slots__ = ("rng", "turn")

    def __init__(self, seed: int) -> None:
        self.rng, self.turn = random.Random(seed), 0

    def draw(self, *about: Any) -> float:
        self.turn += 1
        return (self.rng.random() + 0.1 * self.turn) % 1


class Rotating(Foreign):
    def __init__(self, seed: int) -> None:
        self.rngs = deque(random.Random(seed + more) for more in range(3))
        self.turns = OrderedDict(count=0)

    def draw(self, *about: Any) -> float:
        self.rngs.rotate()
        self.turns["count"] += 1
        return (self.rngs[0].random() + 0.1 * self.turns["count"]) % 1


class AtEnds(Generator):
    """Draws and counts when a trial has ended."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.ended = 0

    def draw(self, *about: Any) -> float:
        return (super().draw() + 0.1 * self.ended) % 1

    def after_trial(self, *about: Any) -> None:
        self.ended += 1
        self.rng.random(3)


SAMPLERS: dict[str, Callable[[int], BaseSampler]] = {
    "generator": Generator,
    **{kind.__name__: lambda seed, kind=kind: Generator(seed, kind) for kind in (np.random.MT19937, np.random.Philox)},
    "SFC64": lambda seed: Generator(seed, np.random.SFC64),
    "python": Python,
    "counters": Counting,
    "bandit": Bandit,
    "slots": Slotted,
    "containers": Rotating,
    "ends": AtEnds,
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


@pytest.mark.ci
@pytest.mark.parametrize("after", [1, 4, 6])
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.ci_one_in(2)
def test_a_search_resumed_with_a_fresh_sampler_makes_the_proposals_of_an_uninterrupted_search(
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


@pytest.mark.parametrize(("make", "times"), [(lambda: RandomSampler(seed=1), 1), (lambda: Counting(1), 2)])
def test_the_state_of_an_optuna_sampler_is_recorded_once_per_trial_and_of_a_custom_one_twice(
    make: Callable[[], BaseSampler], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler of the user's may be changed by a callback, too."""
    taken, take = [], SamplerState.take
    monkeypatch.setattr(SamplerState, "take", lambda state: taken.append(state) or take(state))
    search(optuna.create_study(sampler=make()), MemoryJournal())
    assert len(taken) == 1 + 8 * times  # the first at the start of the search


class Changing(Foreign):
    """Draws from what ``change`` makes of an attribute."""

    def __init__(self, first: Any, change: Callable[[Any], Any]) -> None:
        self.kept, self._change = first, change

    def draw(self, *about: Any) -> float:
        self.kept = self._change(self.kept)
        return 0.5


def grown(values: list[float]) -> list[float]:
    values.append(0.1)
    return values


class Holder:
    """A class of the user's that is not a sampler."""

    def __init__(self) -> None:
        self.rng = random.Random(1)


class Drawing(random.Random):
    pass


def drawn(holder: Any) -> Any:
    getattr(holder, "rng", holder).random()
    return holder


def used(values: Any) -> Any:
    next(values)
    return values


@pytest.mark.parametrize(
    ("first", "change"),
    [
        ([], grown),
        (None, lambda _: {"a": 1}),
        (None, lambda _: 5),
        ((1, random.Random(1)), lambda pair: (pair[0] + 1, pair[1])),
        (iter(range(1000)), used),
        (np.zeros(3), lambda array: array + 1),
        ("a", lambda text: text + "b"),
        (deque([1]), lambda past: deque([*past, 2])),
        (Holder(), drawn),
        (Drawing(1), drawn),
        ({1}, lambda numbers: numbers | {len(numbers) + 1}),
    ],
    ids=["list", "dict", "number", "tuple", "iterator", "array", "text", "deque", "object", "subclass", "set"],
)
def test_an_attribute_of_a_sampler_that_changes_and_cannot_be_saved_is_logged_once(
    first: Any, change: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    search(optuna.create_study(sampler=Changing(first, change)), MemoryJournal())
    assert caplog.text.count("Changing changes kept") == 1
    assert caplog.text.count("which the plan does not keep") == 1


class Mode(StrEnum):
    A = "a"


class Odd(RandomSampler):
    """Has what cannot be kept, or set, or is not a state."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self.system, self.other_bits = random.SystemRandom(), np.random.RandomState(np.random.PCG64(seed))
        self.mode, self.secret, self.large, self.lock = Mode.A, "sk-SECRET", bytearray(1 << 20), threading.Lock()
        self.study = optuna.create_study()
        self.deep: Any = []
        for _ in range(3000):
            self.deep = [self.deep]
        self.many = [[float(i)] * 64 for i in range(64)]
        vars(self)["count"] = 1

    @property
    def count(self) -> int:
        raise AssertionError("it is read where it stands")

    def __getstate__(self) -> Any:
        raise AssertionError("it is not pickled")


def test_odd_attributes_of_a_sampler_are_ignored_without_an_error(caplog: pytest.LogCaptureFixture) -> None:
    state = SamplerState(Odd(0))
    states = [state.take() for _ in range(3)]
    assert states[0].keys() == {"_rng", "other_bits"}
    again = Odd(1)
    SamplerState(again).put(states)
    assert again.mode is Mode.A and again._rng.rng.random() == Odd(0)._rng.rng.random()
    assert "does not keep" not in caplog.text


class Subclass(TPESampler):
    pass


def test_restoring_the_state_of_a_sampler_does_not_change_its_settings(caplog: pytest.LogCaptureFixture) -> None:
    first = Subclass(seed=1, n_startup_trials=3)
    study, journal = optuna.create_study(sampler=first), MemoryJournal()
    search(study, journal)
    state = SamplerState(other := Subclass(seed=1, n_startup_trials=5))
    state.put([SamplerState(first).take()])
    assert other._n_startup_trials == 5
    assert "does not keep" not in caplog.text


def test_the_recorded_state_of_a_sampler_has_only_numbers_that_changed_since_the_last_record() -> None:
    sampler = Counting(0)
    state = SamplerState(sampler)
    assert state.take() == {}
    sampler.draw()
    assert state.take().keys() == {"count", "last", "by['turns'][1]"}
    assert state.take() == {}


def test_the_recorded_state_of_a_grid_sampler_leaves_out_its_grid_points() -> None:
    grid = optuna.samplers.GridSampler({"a": range(100), "b": range(100)}, seed=1)
    assert all("_all_grids" not in path for path in SamplerState(grid).take())
