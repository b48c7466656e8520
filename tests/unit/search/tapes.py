"""A search of a tape, and the values that each trial has alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optuna

import hpstage
from hpstage import schedule as s
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape, alone

GRID = {"a": [1, 2], "late": [1, 2], "b": [1.0, 2.0]}


def space(trial: optuna.Trial) -> dict[str, object]:
    late = trial.suggest_categorical("late", [1, 2])
    return {
        "a": s.piecewise({0: trial.suggest_categorical("a", [1, 2]), 4: late}),
        "b": trial.suggest_categorical("b", [1.0, 2.0]),
    }


def search(
    trainable: object | None = None, make: Callable[[optuna.Trial], Any] = space, **options: Any
) -> hpstage.Result:
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler(GRID, seed=0))
    settings: dict[str, Any] = {"metric": "score", "steps": 8, "n_trials": 8, "store": MemoryJournal()}
    settings |= {"executor": hpstage.InlineExecutor(), "checkpoint_every": 3} | options
    return hpstage.optimize(study, Tape() if trainable is None else trainable, make, **settings)


def check_values(result: hpstage.Result, steps: int = 8) -> None:
    """Every trial has the value that it has alone."""
    for trial in result.study.trials:
        schedules = result.plan.trials[f"{result.study.study_name}/{trial.number}"].schedules
        assert trial.value == alone(schedules, steps).score
