"""Rounds of XGBoost as steps: as xgboost.train trains them, forked anywhere, bit for bit."""

from __future__ import annotations

import pickle
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.boosting import XGBoost
from hpstage.boosting.xgboost import _DRAWN
from hpstage.errors import UsageError
from hpstage.testing import TrainableContract

xgboost = pytest.importorskip("xgboost", reason="pip install hpstage[xgboost]")

ROUNDS = 8
BINARY = {"objective": "binary:logistic", "eval_metric": ["auc", "logloss"]}
OWN = {"nthread": 1, "seed_per_iteration": True, "verbosity": 0}


@cache
def numbers(rows: int, seed: int) -> Any:
    return np.random.RandomState(seed).randn(rows, 8)


def binary(rows: int, seed: int) -> dict[str, Any]:
    x = numbers(rows, seed)
    return {"data": x, "label": (x[:, 0] + x[:, 1] ** 2 + 0.5 * x[:, 7] > 0.7).astype(int)}


def missing(rows: int, seed: int) -> dict[str, Any]:
    x = numbers(rows, seed)
    return {**binary(rows, seed), "data": np.where(np.abs(x) < 0.2, np.nan, x), "weight": np.abs(x[:, 3])}


def sparse(rows: int, seed: int) -> dict[str, Any]:
    scipy = pytest.importorskip("scipy.sparse")
    x = numbers(rows, seed)
    return {**binary(rows, seed), "data": scipy.csr_matrix(np.where(np.abs(x) < 0.7, 0, x)), "base_margin": x[:, 4]}


def categories(rows: int, seed: int) -> dict[str, Any]:
    pandas = pytest.importorskip("pandas")
    x = numbers(rows, seed)
    frame = pandas.DataFrame(x, columns=list("abcdefgh"))
    kinds = (np.abs(x[:, 2]) * 20).astype(int) % 12
    frame["kind"] = pandas.Categorical([f"k{kind}" for kind in kinds], [f"k{kind}" for kind in range(12)])
    return {"data": frame, "label": (kinds * 5 % 12 + x[:, 0] > 6).astype(int), "enable_categorical": True}


def classes(rows: int, seed: int) -> dict[str, Any]:
    x = numbers(rows, seed)
    return {"data": x, "label": (x[:, 0] > 0).astype(int) + (x[:, 1] > 0)}


def ranked(rows: int, seed: int) -> dict[str, Any]:
    return {**classes(rows, seed), "group": [10] * (rows // 10)}


def targets(rows: int, seed: int) -> dict[str, Any]:
    x = numbers(rows, seed)
    return {"data": x, "label": np.c_[3 * x[:, 0], x[:, 1] ** 2]}


def numeric(rows: int, seed: int) -> dict[str, Any]:
    return {**targets(rows, seed), "label": 3 * numbers(rows, seed)[:, 0] + numbers(rows, seed)[:, 1] ** 2}


def trainable(data: Any = binary, **params: Any) -> XGBoost:
    return XGBoost(data(400, 0), data(200, 1), {**(BINARY if data(10, 0)["label"].max() < 2 else {}), **params})


class Own(xgboost.callback.TrainingCallback):  # type: ignore[misc]
    """Parameters for each round, by the library's own means. Where something is drawn, trees have a new generator."""

    def __init__(self, params: list[dict[str, Any]]) -> None:
        self.params = params

    def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        if any(self.params[epoch].get(name, 1) < 1 for name in _DRAWN):
            method = self.params[epoch].get("tree_method", "hist")
            model.set_param({"tree_method": "exact" if method == "hist" else "hist"})
            model.num_features()
            model.set_param({"tree_method": method})
        for name, value in self.params[epoch].items():
            if epoch and value != self.params[epoch - 1].get(name):
                model.set_param(name, value)
        return False


def own(subject: XGBoost, hps: list[dict[str, Any]]) -> tuple[bytes, dict[str, float]]:
    """The model and metrics of the library's own uninterrupted run."""
    train, valid = (xgboost.DMatrix(**data) for data in (subject.train_data, subject.valid_data[""]))
    params = [{**OWN, **subject.params, **hp} for hp in hps]
    measured: dict[str, Any] = {}
    booster = xgboost.train(
        *(params[0], train, len(hps)),
        evals=[(valid, "valid")],
        evals_result=measured,
        callbacks=[Own(params)],
        verbose_eval=False,
    )
    return bytes(booster.save_raw()), {name: values[-1] for name, values in measured["valid"].items()}


def everywhere(subject: XGBoost, hps: list[dict[str, Any]]) -> None:
    """Train, fork at every round, and compare with the library's own run."""
    model, metrics = own(subject, hps)
    subject.setup(hps[0])
    states = []
    for step, hp in enumerate(hps):
        subject.train(step, hp)
        states.append(pickle.loads(pickle.dumps(subject.state_dict())))  # noqa: S301  # its own
    assert subject.state_dict()["model"] == model
    assert subject.evaluate() == metrics
    other = pickle.loads(pickle.dumps(subject))  # noqa: S301  # its own
    for fork in range(1, len(hps)):
        other.setup(hps[0])
        other.load_state_dict(states[fork - 1])
        assert other.state_dict() == states[fork - 1]
        for step in range(fork, len(hps)):
            other.train(step, hps[step])
            if step % 2:
                other.evaluate()
        assert other.state_dict()["model"] == model, fork
        assert other.evaluate() == metrics, fork


def test_a_scheduled_eta_equals_the_learning_rate_scheduler_of_xgboost() -> None:
    subject = trainable()
    rates = [0.3] * 5 + [0.1] * 3
    after = xgboost.callback.LearningRateScheduler([*rates[1:], rates[-1]])  # sets the rate after a round
    params = {**BINARY, **OWN, "eta": rates[0]}
    booster = xgboost.train(params, xgboost.DMatrix(**subject.train_data), ROUNDS, callbacks=[after])
    subject.setup({"eta": rates[0]})
    for step, rate in enumerate(rates):
        subject.train(step, {"eta": rate})
    assert subject.state_dict()["model"] == booster.save_raw()


METHODS = "hist", "exact", "approx"
KINDS: list[tuple[Any, dict[str, Any]]] = [
    *((binary, {"tree_method": method}) for method in METHODS),
    *((binary, {"tree_method": method, "subsample": 0.6, "colsample_bytree": 0.5}) for method in METHODS),
    *((missing, {"tree_method": method, "colsample_bylevel": 0.5}) for method in METHODS),
    *((sparse, {"tree_method": method}) for method in METHODS),
    *((binary, {"booster": "dart", "rate_drop": 0.5, "tree_method": method}) for method in METHODS),
    (binary, {"booster": "dart", "rate_drop": 0.3, "sample_type": "weighted", "normalize_type": "forest", "seed": 7}),
    (binary, {"booster": "dart", "rate_drop": 0.3, "skip_drop": 0.3, "one_drop": 1, "subsample": 0.5}),
    (binary, {"subsample": 0.5, "seed": 3, "colsample_bynode": 0.5, "num_parallel_tree": 3}),
    (binary, {"sampling_method": "gradient_based", "subsample": 0.3}),
    (binary, {"monotone_constraints": "(1,-1,0,0,0,0,0,0)", "interaction_constraints": "[[0,1],[2,3,4]]"}),
    (binary, {"grow_policy": "lossguide", "max_depth": 0, "max_leaves": 9, "max_bin": 16, "colsample_bynode": 0.4}),
    (categories, {}),
    (categories, {"tree_method": "approx", "subsample": 0.5, "max_cat_to_onehot": 1}),
    (classes, {"objective": "multi:softprob", "num_class": 3, "subsample": 0.7}),
    (ranked, {"objective": "rank:ndcg", "subsample": 0.7}),
    (ranked, {"objective": "rank:pairwise", "lambdarank_pair_method": "mean"}),
    (targets, {"multi_strategy": "multi_output_tree", "colsample_bytree": 0.5}),
    (targets, {"multi_strategy": "one_output_per_tree"}),
    (numeric, {"objective": "reg:absoluteerror", "subsample": 0.7}),
    (numeric, {"objective": "reg:quantileerror", "quantile_alpha": [0.2, 0.8]}),
    *((binary, {"booster": "gblinear", "updater": name, "lambda": 0.1}) for name in ("shotgun", "coord_descent")),
    (classes, {"booster": "gblinear", "objective": "multi:softprob", "num_class": 3}),
    (binary, {"booster": "gblinear", "updater": "coord_descent", "feature_selector": "random"}),
]


@pytest.mark.parametrize(("data", "params"), KINDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_fork_at_any_round_equals_xgboost_train(data: Any, params: dict[str, Any]) -> None:
    rates = {} if params.get("booster") == "gblinear" else {"eta": 0.1}
    hps = [dict(rates) for _ in range(ROUNDS)]
    for hp in hps[5:]:
        hp.update({"eta": 0.03} if rates else {})
    everywhere(trainable(data, **params), hps)


CHANGES: dict[str, tuple[Any, Any]] = {
    "eta": (0.3, 0.1),
    "gamma": (0.0, 1.0),
    "max_depth": (3, 5),
    "max_leaves": (4, 9),
    "min_child_weight": (1.0, 20.0),
    "max_delta_step": (0.0, 0.3),
    "lambda": (1.0, 10.0),
    "alpha": (0.0, 1.0),
    "scale_pos_weight": (1.0, 3.0),
    "max_bin": (64, 8),
    **dict.fromkeys(_DRAWN, (1.0, 0.5)),
    "rate_drop": (0.1, 0.8),
    "skip_drop": (0.9, 0.0),
    "max_cat_to_onehot": (20, 1),
    "max_cat_threshold": (64, 1),
}


def test_every_parameter_that_may_follow_a_schedule_is_tested() -> None:
    assert CHANGES.keys() == XGBoost._changing


@pytest.mark.parametrize("others", [{}, {"subsample": 0.7}], ids=["alone", "sampled"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.one_in(4)
def test_a_scheduled_parameter_equals_a_changed_parameter_in_xgboost_train(
    name: str, method: str, others: dict[str, Any]
) -> None:
    if method == "exact" and (name == "colsample_bynode" or "cat_" in name):
        pytest.skip("XGBoost has no such trees")
    needs = {"max_leaves": {"grow_policy": "lossguide"}, "skip_drop": {"booster": "dart", "rate_drop": 0.8}}
    needs["rate_drop"] = {"booster": "dart"}
    subject = trainable(categories if "cat_" in name else binary, tree_method=method, **others, **needs.get(name, {}))
    before, after = CHANGES[name]
    changed = [{name: before if step < 4 else after} for step in range(ROUNDS)]
    everywhere(subject, changed)
    if method == "hist":
        assert own(subject, changed)[0] not in [own(subject, [{name: v}] * ROUNDS)[0] for v in CHANGES[name]]


class TestContract(TrainableContract):
    @pytest.fixture
    def make_trainable(self) -> Any:
        return lambda: trainable(subsample=0.6, colsample_bytree=0.6)

    @pytest.fixture
    def values_at(self) -> Any:
        return lambda step: {"eta": 0.3 if step < 3 else 0.1, "max_depth": 3.0}


@pytest.mark.parametrize("booster", ["gbtree", "dart"])
def test_a_search_trains_each_round_once_and_has_the_metrics_of_xgboost_train(
    booster: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subject = trainable(subsample=0.5, booster=booster, **({"rate_drop": 0.3} if booster == "dart" else {}))
    grid = {"depth": [2, 4], "at": [3, 5], "rounds": [6, 8]}
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler(grid))

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {
            "max_depth": trial.suggest_categorical("depth", grid["depth"]),
            "eta": s.multistep(0.3, [trial.suggest_categorical("at", grid["at"])], gamma=0.3),
            "steps": trial.suggest_categorical("rounds", grid["rounds"]),
        }

    result = hpstage.optimize(
        study, subject, space, metric="auc", steps=8, executor=hpstage.InlineExecutor(), store=tmp_path
    )
    assert result.savings.steps_trained == result.savings.steps_unique == 2 * (8 + 5)
    assert "did you mean" not in caplog.text
    for trial in study.trials:
        depth, at, rounds = (trial.params[name] for name in ("depth", "at", "rounds"))
        rates = [0.3 if step < at else 0.3 * 0.3 for step in range(rounds)]
        model, metrics = own(subject, [{"max_depth": depth, "eta": rate} for rate in rates])
        assert trial.value == metrics["auc"]
        assert result.trial(trial.number).state()["model"] == model


def test_trials_with_different_parameters_share_one_data_set_without_changing_models() -> None:
    subject = trainable()
    models: dict[int, bytes] = {}
    some = [
        {"tree_method": method, "max_bin": bins, **more}
        for method in METHODS
        for bins in (8, 64)
        for more in ({}, {"subsample": 0.5}, {"booster": "dart", "rate_drop": 0.5})
    ]
    for at in [*range(len(some)), *np.random.RandomState(0).permutation(2 * len(some))]:
        hp = some[at % len(some)]
        subject.setup(hp)
        for step in range(3):
            subject.train(step, hp)
        assert models.setdefault(at % len(some), subject.state_dict()["model"]) == subject.state_dict()["model"]
    assert len(set(models.values())) == len({str(hp) for hp in some if hp["tree_method"] != "exact"}) + 3


def test_the_number_of_threads_does_not_change_the_model() -> None:
    models = set()
    for threads in (1, 2, 3):
        subject = trainable(subsample=0.5, nthread=threads)
        subject.setup({})
        for step in range(3):
            subject.train(step, {})
        models.add(subject.state_dict()["model"])
    assert len(models) == 1


def test_several_validation_sets_or_none_may_be_given() -> None:
    metrics = {"eval_metric": ["auc", "error@0.7"], "objective": "binary:logistic"}
    several = XGBoost(binary(400, 0), {"a-b:c": binary(200, 1), "d": binary(200, 2)}, metrics)
    none = XGBoost(tuple(binary(400, 0).values()), params=metrics)
    for subject in (several, none):
        subject.setup({})
        with pytest.raises(RuntimeError, match="no round has been trained"):
            subject.evaluate()
        subject.train(0, {})
    assert set(several.evaluate()) == {"a-b:c_auc", "a-b:c_error@0.7", "d_auc", "d_error@0.7"}
    assert set(none.evaluate()) == {"auc", "error@0.7"}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"seed_per_iteration": False}, "random samples would depend on where training began"),
        ({"device": "cuda"}, "device='cuda' cannot be forked: only on a CPU are rounds"),
        ({"lambdarank_unbiased": True}, "does not continue estimates of position bias"),
        ({"process_type": "update"}, "updating trees is not a round"),
        ({"updater": "grow_colmaker,prune"}, "`tree_method` decides how trees are grown"),
        ({"booster": "gblinear", "feature_selector": "shuffle"}, "the order of features is not in the model file"),
        ({"booster": "gblinear", "tolerance": 0.1}, "the weights of the round before are not in the model file"),
        ({"booster": "gblinear", "nthread": 2}, "several threads of the updater 'shotgun' race"),
        ({"learning_rate": 0.5}, "'learning_rate' is an alias, which is not supported. Write 'eta'"),
        ({"max_deph": 5}, "no parameter 'max_deph'; did you mean 'max_depth'"),
        ({"n_estimators": 100}, "Give the number as steps="),
        ({"early_stopping_rounds": 5}, "Give an algorithm that prunes"),
        ({"objective": print}, "'objective' is a function"),
        ({"max_depth": None}, "'max_depth' is None. Leave it out"),
    ],
)
def test_parameters_that_prevent_exact_forks_are_refused_by_name(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trainable(**params)
    with pytest.raises(UsageError, match=message):
        trainable().setup(params)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("tree_method", "hist", "approx"), ("num_parallel_tree", 1, 2), ("seed", 0, 1), ("base_score", 0.5, 0.2)],
)
def test_parameters_that_cannot_follow_a_schedule_are_refused_when_they_change(
    name: str, before: Any, after: Any
) -> None:
    subject = trainable()
    subject.setup({name: before})
    subject.train(0, {name: before})
    state = subject.state_dict()
    with pytest.raises(UsageError, match=f"'{name}' cannot follow a schedule; these can: alpha, colsample_bylevel"):
        subject.train(1, {name: after})
    subject.setup({name: before})
    subject.load_state_dict(state)
    with pytest.raises(UsageError, match=f"'{name}' cannot follow a schedule"):
        subject.train(1, {name: after})


def test_no_parameter_of_a_linear_booster_may_change() -> None:
    subject = trainable(booster="gblinear")
    subject.setup({"eta": 0.5})
    subject.train(0, {"eta": 0.5})
    with pytest.raises(
        UsageError, match="XGBoost's 'eta' cannot follow a schedule; with its other parameters, none can"
    ):
        subject.train(1, {"eta": 0.1})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda x, y: (x, y, x), r"data is a tuple; it must be \(X, y\) or a dict of arguments of xgboost.DMatrix"),
        (lambda x, y: xgboost.DMatrix(x, y), "data is a DMatrix"),
        (lambda x, y: {"data": x, "label": y, "silent": True}, r"cannot have \['silent'\]. Give only"),
    ],
    ids=["three", "a data set", "silent"],
)
def test_training_data_of_an_unsupported_form_are_refused(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        XGBoost(data(*binary(40, 0).values()))


def test_parameters_may_be_arrays() -> None:
    params = {"objective": "reg:quantileerror", "quantile_alpha": np.array([0.2, 0.8])}
    subject = XGBoost(numeric(200, 0), params=params)
    subject.setup({"eta": 0.3})
    for step, rate in enumerate((0.3, 0.3, 0.1)):
        subject.train(step, {"eta": rate})
    assert subject.evaluate().keys() == {"quantile"}
