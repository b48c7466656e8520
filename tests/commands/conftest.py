"""Stores that commands read."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.testing.toys import Failing


def space(trial: optuna.Trial) -> dict[str, object]:
    a = s.piecewise({0: trial.suggest_int("a", 1, 2), 6: trial.suggest_int("late", 6, 7)})  # 7 fails
    return {"a": a, "b": trial.suggest_categorical("b", [1.0, 2.0])}


@pytest.fixture(scope="package")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, hpstage.Result]:
    """A store with two studies on it, trained for real."""
    folder = tmp_path_factory.mktemp("searched") / "a store"
    for name in ("second", "first"):
        study = optuna.create_study(
            study_name=name, direction="minimize", sampler=optuna.samplers.RandomSampler(seed=len(name))
        )
        result = hpstage.optimize(
            study,
            Failing(),
            space,
            metric="score",
            steps=16,
            n_trials=8,
            store=folder,
            checkpoint_every=2,
            algorithm=SuccessiveHalving(4, 2),
            executor=hpstage.InlineExecutor(),
            catch=(ArithmeticError,),
        )
    return folder, result


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder
