"""Searches whose every step draws from the generators of Python, NumPy and torch."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import optuna
import torch
from distributed import Client

import hpstage
from hpstage import schedule as s
from hpstage.executor import Executor
from hpstage.schedule import Scalar
from hpstage.store import Journal, MemoryJournal
from hpstage.training.randomness import Purpose, rekey

STEPS = 12
TRIALS = 10
DRAWS = 20  # per step

Trials = list[tuple[dict[str, object], str, float | None]]


class Drawing:
    """Its weight is made of random numbers; between two of them others have time to draw, too."""

    version = "1"

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        self.weight = random.random()

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        for _ in range(DRAWS):
            drawn = random.random() + float(np.random.random()) + float(torch.rand(1))
            self.weight = 0.9 * self.weight + float(hp["a"] or 0) * drawn
            time.sleep(0.0002)  # gives Python's lock away, as reading data does

    def evaluate(self) -> dict[str, float]:
        return {"weight": self.weight}

    def state_dict(self) -> object:
        return {"weight": self.weight}

    def load_state_dict(self, state: object) -> None:
        assert isinstance(state, dict)
        self.weight = state["weight"]

    def describe_data(self) -> str:
        """Looks at some of its data, which are made by chance, as data sets that augment are."""
        for sample in range(200):
            rekey(0, sample, Purpose.DATA)
            time.sleep(0.0005)
        return "drawn"


def space(trial: optuna.Trial) -> dict[str, object]:
    late = trial.suggest_int("late", 1, 3)
    return {"a": s.piecewise({0: trial.suggest_int("a", 1, 2), trial.suggest_int("drop", 4, 8): late}), "seed": 3}


def search(executor: Executor | Client, store: Journal | Path, *, name: str = "study", seed: int = 5) -> Trials:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(study_name=name, direction="maximize", sampler=optuna.samplers.RandomSampler(seed=seed))
    hpstage.optimize(
        study, Drawing(), space, metric="weight", steps=STEPS, n_trials=TRIALS, executor=executor, store=store,
        checkpoint_every=4,
    )  # fmt: skip
    return [(trial.params, trial.state.name, trial.value) for trial in study.trials]


def inline(seed: int = 5) -> Trials:
    return search(hpstage.InlineExecutor(), MemoryJournal(), seed=seed)


def differing(found: Trials, expected: Trials) -> int:
    """How many trials differ."""
    assert len(found) == len(expected)
    return sum(one != other for one, other in zip(found, expected, strict=True))
