"""Rounds of LightGBM as steps: as lightgbm.train trains them, forked anywhere, bit for bit."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.boosting.lightgbm import _CHANGING
from hpstage.errors import UsageError
from hpstage.store import MemoryJournal
from hpstage.testing import TrainableContract

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


def straight(hp: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    subject = trainable()
    subject.setup(hp_at(0, hp))
    states, metrics = [], []
    for step in range(ROUNDS):
        subject.train(step, hp_at(step, hp))
        states.append(subject.state_dict())
        metrics.append(subject.evaluate())
    return states, metrics


SAMPLED = [
    {},
    {"bagging_fraction": 0.7},
    {"feature_fraction": 0.5},
    {"feature_fraction_bynode": 0.5},
    {"extra_trees": True},
    {"bagging_fraction": 0.5, "feature_fraction": 0.5, "seed": 7},
    {"objective": "multiclass", "num_class": 3, "metric": "multi_logloss"},
    {"objective": "regression_l1", "metric": "l1"},
]


@pytest.mark.parametrize("hp", SAMPLED, ids=str)
def test_a_fork_at_any_round_equals_training_straight_through(hp: Mapping[str, Any]) -> None:
    states, metrics = straight(hp)
    subject = trainable()
    for fork in range(1, ROUNDS):
        subject.setup(hp_at(0, hp))
        subject.load_state_dict(states[fork - 1])
        assert subject.state_dict() == states[fork - 1]
        for step in range(fork, ROUNDS):
            subject.train(step, hp_at(step, hp))
        assert trees(subject.state_dict()["model"]) == trees(states[-1]["model"])
        assert subject.evaluate() == metrics[-1]


CHANGES: dict[str, tuple[Any, Any]] = {
    "num_leaves": (5.0, 9.0),
    "lambda_l1": (0.0, 0.5),
    "lambda_l2": (0.0, 5.0),
    "min_gain_to_split": (0.0, 1.0),
    "min_sum_hessian_in_leaf": (1e-3, 5.0),
    "max_delta_step": (0.0, 0.3),
    "path_smooth": (0.0, 2.0),
    "feature_fraction": (1.0, 0.5),
    "feature_fraction_bynode": (1.0, 0.5),
    "learning_rate": (0.1, 0.03),
}


def test_every_parameter_that_may_follow_a_schedule_is_tested() -> None:
    assert CHANGES.keys() == _CHANGING


@pytest.mark.parametrize("others", [{}, {"max_depth": 2, "bagging_fraction": 0.6}], ids=["alone", "with others"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_fork_before_or_after_a_parameter_change_equals_training_straight_through(
    name: str, others: dict[str, Any]
) -> None:
    before, after = CHANGES[name]
    hps = [{"num_leaves": 7, **others, name: before if step < 4 else after} for step in range(ROUNDS)]
    subject = trainable()
    subject.setup(hps[0])
    states = []
    for step, hp in enumerate(hps):
        subject.train(step, hp)
        states.append(subject.state_dict())
    for fork in range(1, ROUNDS):
        subject.setup(hps[0])
        subject.load_state_dict(states[fork - 1])
        for step in range(fork, ROUNDS):
            subject.train(step, hps[step])
        assert trees(subject.state_dict()["model"]) == trees(states[-1]["model"]), fork


def test_trees_equal_those_of_lightgbm_train() -> None:
    x, y, _, _ = arrays()
    rates = lightgbm.reset_parameter(learning_rate=RATES)
    own = lightgbm.train(ALONE, lightgbm.Dataset(x, y), ROUNDS, callbacks=[rates])
    assert trees(straight({})[0][-1]["model"]) == trees(own.model_to_string())


def test_sampled_trees_equal_those_of_lightgbm_train_with_a_new_seed_for_each_round() -> None:
    x, y, _, _ = arrays()

    def each(env: Any) -> None:
        if env.iteration:
            env.model.reset_parameter(
                {"learning_rate": RATES[env.iteration], "feature_fraction_seed": 3 + env.iteration}
            )

    each.before_iteration, each.order = True, 0  # type: ignore[attr-defined]
    params = {**ALONE, "seed": 3, "feature_fraction": 0.5, "feature_fraction_seed": 3, "learning_rate": RATES[0]}
    own = lightgbm.train(params, lightgbm.Dataset(x, y), ROUNDS, callbacks=[each])
    assert trees(straight({"feature_fraction": 0.5, "seed": 3})[0][-1]["model"]) == trees(own.model_to_string())


class TestContract(TrainableContract):
    @pytest.fixture
    def make_trainable(self) -> Any:
        return lambda: trainable(bagging_fraction=0.6, feature_fraction=0.6)

    @pytest.fixture
    def values_at(self) -> Any:
        return lambda step: {"learning_rate": 0.1 if step < 3 else 0.03, "num_leaves": 7.0}


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


def test_a_search_trains_each_round_once_and_has_the_metrics_of_training_without_sharing() -> None:
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


def test_a_validation_set_may_be_named_data() -> None:
    x, y, x_valid, y_valid = arrays()
    named = hpstage.boosting.LightGBM((x, y), {"data": (x_valid, y_valid)}, PARAMS)
    assert [*named.valid_data] == ["data"]
    assert [*hpstage.boosting.LightGBM((x, y), {"data": x_valid, "label": y_valid}, PARAMS).valid_data] == [""]


def test_several_validation_sets_or_none_may_be_given() -> None:
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
        ({"boosting": "dart"}, "boosting='dart' cannot be forked: the weights, sums or counts of dart"),
        ({"data_sample_strategy": "goss"}, "goss samples only after a number of rounds"),
        ({"objective": "rank_xendcg"}, "it has its own random generator"),
        ({"objective": "xendcg"}, "it has its own random generator"),
        ({"linear_tree": True}, "linear_tree=True cannot be forked"),
        ({"bagging_freq": 5}, "bagging_freq=5 cannot be forked"),
        ({"bagging_seed": 5}, "`seed` and the number of the round decide all random numbers"),
        ({"cegb_penalty_feature_coupled": "1,2"}, "the features used before"),
        ({"subsample": 0.5}, "'subsample' is an alias, which is not supported. Write 'bagging_fraction'"),
        ({"num_leafs": 5}, "no parameter 'num_leafs'; did you mean 'num_leaf"),
        ({"n_estimators": 100}, "Give the number as steps="),
        ({"early_stopping_round": 5}, "Give an algorithm that prunes"),
    ],
)
def test_parameters_that_prevent_exact_forks_are_refused_by_name(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trainable(**params)
    with pytest.raises(UsageError, match=message):
        trainable().setup(params)


@pytest.mark.parametrize("name", ["bagging_fraction", "max_depth", "max_bin", "min_data_in_leaf"])
def test_parameters_that_cannot_follow_a_schedule_are_refused_when_they_change(name: str) -> None:
    values = {"bagging_fraction": (1.0, 0.5), "max_depth": (2, 4), "max_bin": (63, 15), "min_data_in_leaf": (20, 5)}
    before, after = values[name]
    subject = trainable()
    subject.setup({name: before})
    subject.train(0, {name: before})
    state = subject.state_dict()
    with pytest.raises(UsageError, match=f"'{name}' cannot follow a schedule; these can: feature_fraction"):
        subject.train(1, {name: after})
    subject.setup({name: before})
    subject.load_state_dict(state)
    with pytest.raises(UsageError, match=f"'{name}' cannot follow a schedule"):
        subject.train(1, {name: after})


def test_trials_share_binned_data_only_if_their_parameters_are_equal() -> None:
    subject = trainable()
    models = {}
    for seed in (1, 2, 1):
        hp = {"seed": seed, "bin_construct_sample_cnt": 50, "num_leaves": 7.0}
        subject.setup(hp)
        subject.train(0, hp)
        model = trees(subject.state_dict()["model"])
        assert models.setdefault(seed, model) == model
    assert models[1] != models[2]


def test_a_trainable_that_has_trained_can_be_sent_to_another_process() -> None:
    subject = trainable()
    subject.setup({})
    subject.train(0, {})
    sent = pickle.loads(pickle.dumps(subject))  # noqa: S301  # its own
    sent.setup({})
    sent.train(0, {})
    assert sent.state_dict() == subject.state_dict()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda x, y: (x, y, x), r"data is a tuple; it must be \(X, y\) or a dict of arguments of lightgbm.Dataset"),
        (lambda x, y: lightgbm.Dataset(x, y), "data is a Dataset"),
        (lambda x, y: {"data": x, "label": y, "init_score": y}, r"cannot have \['init_score'\]. Give only"),
    ],
    ids=["three", "a data set", "init_score"],
)
def test_training_data_of_an_unsupported_form_are_refused(data: Any, message: str) -> None:
    x, y, _, _ = arrays()
    with pytest.raises(UsageError, match=message):
        hpstage.boosting.LightGBM(data(x, y))
