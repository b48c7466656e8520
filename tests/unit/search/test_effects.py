"""A hyperparameter that nothing reads in training is named, by states that should differ and do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.store import MemoryJournal


class Weights:
    """Reads ``a`` in each step, and ``b`` only where it begins."""

    def setup(self, hp: Mapping[str, Any]) -> None:
        self.weights, self.bias, self.b = np.zeros(2), np.zeros(1), hp["b"]

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        self.weights = self.weights * 2 + [hp["a"] * (step + 1), self.b]
        self.bias = self.bias + self.weights[0]

    def evaluate(self) -> dict[str, float]:
        return {"value": float(self.weights.sum())}

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "bias": self.bias, "b": self.b}

    def load_state_dict(self, state: Any) -> None:
        self.weights, self.bias, self.b = state["weights"].copy(), state["bias"].copy(), state["b"]


class Diverged(Weights):
    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        self.weights = np.full(2, math.nan)


class Evaluated(Weights):
    """Of which only what is evaluated depends on ``a``."""

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        self.weights, self.a = self.weights + self.b, hp["a"]

    def evaluate(self) -> dict[str, float]:
        return {"value": getattr(self, "a", 0) + 0.5}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"a": getattr(self, "a", 0)}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.a = state["a"]


Space = Callable[[optuna.Trial], dict[str, s.Schedule | int]]


def parting(name: str) -> Space:
    def space(trial: optuna.Trial) -> dict[str, s.Schedule | int]:
        return {"a": 1, "b": 1} | {name: s.piecewise({0: 1, trial.suggest_int("at", 2, 5): 3})}

    return space


@pytest.mark.ci
@pytest.mark.parametrize(
    ("trainable", "space", "named"),
    [
        (Weights(), parting("b"), "'b'"),
        (Weights(), parting("a"), None),
        (Evaluated(), lambda trial: {"a": trial.number, "b": trial.suggest_int("at", 1, 1)}, None),
        (Diverged(), parting("b"), None),
        (Weights(), lambda trial: {"a": 1, "b": 1, "c": trial.suggest_int("at", 2, 5)}, "'c'"),
        (Weights(), lambda trial: {"a": 1, "b": 1, "c": trial.number, "d": -trial.number}, "'c', 'd'"),
    ],
    ids=["read where it begins", "read in each step", "read by evaluate()", "NaN", "read by nobody", "two"],
)
@pytest.mark.parametrize("sharing", [True, False])
def test_a_hyperparameter_without_effect_is_logged_once(
    trainable: object, space: Space, named: str | None, sharing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = optuna.samplers.GridSampler({"at": [2, 3, 4, 5]}, seed=0)
    hpstage.optimize(
        optuna.create_study(sampler=sampler), trainable, space, metric="value", steps=8, n_trials=4,
        store=MemoryJournal(), executor=hpstage.InlineExecutor(), show_progress_bar=False, sharing=sharing,
    )  # fmt: skip
    messages = [text for record in caplog.records if "no effect" in (text := record.getMessage())]
    assert len(messages) == (named is not None)
    assert named is None or f"{named} had no effect on training so far: trials " in messages[0]


def test_the_no_effect_warning_names_both_trials_even_if_one_trial_began_both_branches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for late in (3, 1):
        study.enqueue_trial({"late": late})

    def space(trial: optuna.Trial) -> dict[str, s.Schedule | int]:
        return {"a": 1, "b": s.piecewise({0: 1, 4: trial.suggest_categorical("late", [1, 3])})}

    hpstage.optimize(
        study, Weights(), space, metric="value", steps=8, n_trials=2,
        store=MemoryJournal(), executor=hpstage.InlineExecutor(), show_progress_bar=False,
    )  # fmt: skip
    messages = [text for record in caplog.records if "no effect" in (text := record.getMessage())]
    assert [text.partition(": ")[2].partition(" differ")[0] for text in messages] == ["trials 0 and 1"]
