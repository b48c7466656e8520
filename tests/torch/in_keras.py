"""Keras through the five methods: its variables are the state, forked bit for bit. Run by test_jax_and_keras.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.training.identity.environment import describe
from hpstage.training.trainables import as_trainable

example: Any = pytest.importorskip("scripts.example_keras", reason="pip install keras scikit-learn")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's own, of torch's
Digits, keras = example.Digits, example.keras


def searched(store: Path, **options: Any) -> tuple[hpstage.Result, list[Any]]:
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"drop": [2, 3]}, seed=0), direction="maximize")
    result = hpstage.optimize(
        study,
        Digits(),
        lambda trial: {"lr": s.multistep(0.01, [trial.suggest_categorical("drop", [2, 3])], gamma=0.1)},
        metric="accuracy",
        steps=4,
        n_trials=2,
        executor=hpstage.InlineExecutor(),
        store=store,
        **options,
    )
    weights = [{name: array.tobytes() for name, array in result.trial(number).state().items()} for number in (0, 1)]
    return result, [[trial.value for trial in study.trials], weights]


def test_keras_trials_with_sharing_are_verified_and_equal_trials_without_sharing(tmp_path: Path) -> None:
    shared, found = searched(tmp_path / "shared", verify="all")
    apart, alone = searched(tmp_path / "alone", sharing=False)
    assert found == alone
    assert (shared.savings.steps_trained, apart.savings.steps_trained) == (6, 8)


def test_the_keras_backend_is_part_of_the_key() -> None:
    described = describe(as_trainable(Digits())).described
    assert described["keras"] == f"{keras.__version__} on {keras.backend.backend()}, float32"
    assert keras.backend.backend() in described
