"""Rounds of LightGBM as steps: as lightgbm.train trains them, forked anywhere, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.errors import UsageError
from hpstage.store import MemoryJournal

lightgbm = pytest.importorskip("lightgbm", reason="pip install hpstage[lightgbm]")

ROUNDS = 8
PARAMS = {"objective": "binary", "metric": ["auc", "binary_logloss"]}


@cache
def arrays() -> tuple[Any, Any, Any, Any]:
    numbers = np.random.RandomState(0)
    x = numbers.randn(600, 8)
    y = (x[:, 0] + x[:, 1] ** 2 + 0.5 * numbers.randn(600) > 0.7).astype(int)
    return x[:400], y[:400], x[400:], y[400:]


def trainable(**params: Any) -> hpstage.boosting.LightGBM:
    x, y, x_valid, y_valid = arrays()
    return hpstage.boosting.LightGBM((x, y), (x_valid, y_valid), {**PARAMS, **params})


def trees(model: str) -> str:
    """The trees of a model file, which also has the parameters."""
    return model.partition("Tree=0")[2].partition("\nparameters")[0]


RATES = [0.1] * 5 + [0.03] * 3
ALONE = {"num_leaves": 7, "num_threads": 1, "deterministic": True, "force_row_wise": True, "verbosity": -1, **PARAMS}


def hp_at(step: int, hp: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_leaves": 7, "learning_rate": RATES[step], **hp}


def straight(hp: Mapping[str, Any]) -> tuple[list[str], list[dict[str, float]]]:
    subject = trainable()
    subject.setup(hp_at(0, hp))
    models, metrics = [], []
    for step in range(ROUNDS):
        subject.train(step, hp_at(step, hp))
        models.append(subject.state_dict()["model"])
        metrics.append(subject.evaluate())
    return models, metrics


SAMPLED = [
    {},
    {"bagging_fraction": 0.7},
    {"feature_fraction": 0.5},
    {"feature_fraction_bynode": 0.5},
    {"extra_trees": True},
    {"data_sample_strategy": "goss"},
    {"bagging_fraction": 0.5, "feature_fraction": 0.5, "seed": 7},
    {"objective": "multiclass", "num_class": 3, "metric": "multi_logloss"},
    {"objective": "regression_l1", "metric": "l1"},
]


@pytest.mark.parametrize("hp", SAMPLED, ids=str)
def test_a_fork_at_any_round_continues_as_straight_through(hp: Mapping[str, Any]) -> None:
    models, metrics = straight(hp)
    subject = trainable()
    for fork in range(1, ROUNDS):
        subject.setup(hp_at(0, hp))
        subject.load_state_dict({"model": models[fork - 1]})
        assert subject.state_dict()["model"] == models[fork - 1]
        for step in range(fork, ROUNDS):
            subject.train(step, hp_at(step, hp))
        assert trees(subject.state_dict()["model"]) == trees(models[-1])
        assert subject.evaluate() == metrics[-1]


def test_trees_are_those_of_the_librarys_own_loop() -> None:
    x, y, _, _ = arrays()
    rates = lightgbm.reset_parameter(learning_rate=RATES)
    own = lightgbm.train(ALONE, lightgbm.Dataset(x, y), ROUNDS, callbacks=[rates])
    assert trees(straight({})[0][-1]) == trees(own.model_to_string())


def test_sampled_trees_are_those_of_the_librarys_own_loop_with_a_seed_for_each_round() -> None:
    x, y, _, _ = arrays()

    def each(env: Any) -> None:
        if env.iteration:
            env.model.reset_parameter(
                {"learning_rate": RATES[env.iteration], "feature_fraction_seed": 3 + env.iteration}
            )

    each.before_iteration, each.order = True, 0  # type: ignore[attr-defined]
    params = {**ALONE, "seed": 3, "feature_fraction": 0.5, "feature_fraction_seed": 3, "learning_rate": RATES[0]}
    own = lightgbm.train(params, lightgbm.Dataset(x, y), ROUNDS, callbacks=[each])
    assert trees(straight({"feature_fraction": 0.5, "seed": 3})[0][-1]) == trees(own.model_to_string())


def search(executor: Any, subject: Any) -> optuna.Study:
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.GridSampler({"leaves": [5, 9], "at": [3, 5], "rounds": [6, 8]})
    )

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {
            "num_leaves": trial.suggest_categorical("leaves", [5, 9]),
            "learning_rate": s.multistep(0.1, [trial.suggest_categorical("at", [3, 5])], gamma=0.3),
            "steps": trial.suggest_categorical("rounds", [6, 8]),
        }

    result = hpstage.optimize(
        study, subject, space, metric="auc", steps=ROUNDS, executor=executor, store=MemoryJournal()
    )
    assert result.savings.steps_trained == result.savings.steps_unique == 2 * (8 + 5)
    return study


def test_a_search_trains_each_round_once_and_measures_what_lightgbm_would() -> None:
    study = search(hpstage.InlineExecutor(), trainable(feature_fraction=0.5))
    for trial in study.trials:
        alone = trainable(feature_fraction=0.5)
        for step in range(trial.params["rounds"]):
            hp = {
                "num_leaves": trial.params["leaves"],
                "learning_rate": 0.1 if step < trial.params["at"] else 0.1 * 0.3,
            }
            if step == 0:
                alone.setup(hp)
            alone.train(step, hp)
        assert trial.value == alone.evaluate()["auc"]


def test_several_valid_sets_and_none() -> None:
    x, y, x_valid, y_valid = arrays()
    weighted = {"data": x_valid, "label": y_valid, "weight": np.ones(len(y_valid))}
    several = hpstage.boosting.LightGBM((x, y), {"a": (x_valid, y_valid), "b": weighted}, PARAMS)
    none = hpstage.boosting.LightGBM((x, y), params=PARAMS)
    for subject in (several, none):
        subject.setup({})
        subject.train(0, {})
    assert set(several.evaluate()) == {"a_auc", "b_auc", "a_binary_logloss", "b_binary_logloss"}
    assert set(none.evaluate()) == {"auc", "binary_logloss"}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"boosting": "dart"}, "boosting='dart' cannot be forked: dart scales"),
        ({"linear_tree": True}, "linear_tree=True cannot be forked"),
        ({"bagging_freq": 5}, "bagging_freq=5 cannot be forked"),
        ({"subsample": 0.5}, "'subsample' is an alias here: write 'bagging_fraction'"),
        ({"n_estimators": 100}, "give the number of rounds as steps="),
        ({"early_stopping_round": 5}, "give an algorithm that prunes"),
    ],
)
def test_what_cannot_be_forked_is_refused_by_name(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trainable(**params)
    with pytest.raises(UsageError, match=message):
        trainable().setup(params)


def test_data_of_another_form_are_refused() -> None:
    with pytest.raises(UsageError, match=r"data are \(X, y\) or a dict of arguments of lightgbm.Dataset"):
        hpstage.boosting.LightGBM(arrays())
