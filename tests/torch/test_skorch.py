"""Epochs of skorch as steps: as its own fit trains with the same random numbers, forked anywhere, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints.state_tree import clone, digest
from hpstage.cluster import DaskExecutor
from hpstage.errors import UsageError
from hpstage.training.randomness import Purpose, rekey
from hpstage.training.trainables import as_trainable

pytest.importorskip("skorch", reason="pip install hpstage[skorch]")

from skorch import NeuralNetClassifier, NeuralNetRegressor
from skorch.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    EpochScoring,
    GradientNormClipping,
    LoadInitState,
    LRScheduler,
    PrintLog,
)

from hpstage.torch.skorch import SkorchTrainable

STEPS = 6
NUMBERS = np.random.RandomState(0)
X = NUMBERS.randn(90, 6).astype(np.float32)
Y = (X[:, 0] + 0.5 * NUMBERS.randn(90) > 0).astype(np.int64)


class Net(torch.nn.Module):
    def __init__(self, width: int = 8, out: int = 2) -> None:
        super().__init__()
        layers = torch.nn.Linear(6, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Dropout(0.3)
        self.layers = torch.nn.Sequential(*layers, torch.nn.Linear(width, out))
        self.out = out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found.softmax(-1) if self.out > 1 else found


class Averaging(Callback):  # type: ignore[misc]
    """A user's own, with a state."""

    def on_train_begin(self, net: Any, **kwargs: Any) -> None:
        self.mean_ = {name: torch.zeros_like(value) for name, value in net.module_.state_dict().items()}

    def on_epoch_end(self, net: Any, **kwargs: Any) -> None:
        for name, value in net.module_.state_dict().items():
            self.mean_[name] = 0.5 * self.mean_[name] + 0.5 * value
        net.history.record("norm", float(self.mean_["layers.0.weight"].norm()))


class Keyed(Callback):  # type: ignore[misc]
    """Random numbers as hpstage has them."""

    def on_epoch_begin(self, net: Any, **kwargs: Any) -> None:
        rekey(0, len(net.history) - 1)


def classifier(*callbacks: Any, **kwargs: Any) -> Any:
    usual = {"lr": 0.1, "batch_size": 16, "iterator_train__shuffle": True, "optimizer__momentum": 0.9, "max_epochs": 6}
    return NeuralNetClassifier(Net, callbacks=list(callbacks) or None, **{**usual, **kwargs})


def with_callbacks(*more: Any) -> Any:
    scores = EpochScoring("accuracy", on_train=True, name="train_acc"), EpochScoring("roc_auc", use_caching=False)
    named = ("lr_scheduler", LRScheduler("StepLR", step_size=2, gamma=0.3))
    return classifier(*more, *scores, named, GradientNormClipping(1.0), EarlyStopping(patience=3), Averaging())


def regressor(*more: Any) -> Any:
    return NeuralNetRegressor(
        Net, module__out=1, lr=0.01, callbacks=list(more), optimizer=torch.optim.Adam, max_epochs=6, train_split=None
    )


NETS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "plain": (classifier, Y, {"module__width": 12}),
    "with callbacks": (with_callbacks, Y, {}),
    "a regressor": (regressor, X[:, :1] ** 2, {"optimizer__weight_decay": 0.01}),
}


def step(adapter: Any, number: int, hp: Mapping[str, Any]) -> bool:
    try:
        adapter.train(number, hp)
    except hpstage.StopTraining:
        return True
    return False


def plain(history: Any) -> Any:
    return [{name: value for name, value in row.items() if name != "dur"} for row in history]


@pytest.mark.ci
@pytest.mark.parametrize("name", NETS)
def test_weights_and_history_equal_those_of_skorch_fit_also_after_a_fork(name: str) -> None:
    build, y, hp = NETS[name]
    adapter: Any = as_trainable(SkorchTrainable(build(), X, y))
    adapter.setup(hp)
    states, metrics = [], []
    for number in range(STEPS):
        ended = step(adapter, number, hp)
        metrics.append(adapter.evaluate())
        states.append(clone(adapter.state_dict()))
        if ended:
            break
    net = adapter._attached["training"].net
    alone = build(Keyed()).set_params(verbose=0, **hp)
    rekey(0, 0, Purpose.SETUP)
    alone.fit(X, y)
    ours = net.module_.state_dict()
    assert all(torch.equal(value, ours[key]) for key, value in alone.module_.state_dict().items())
    assert plain(net.history) == plain(alone.history) and len(states) == len(alone.history)
    for fork in range(len(states) - 1):
        adapter.setup(hp)
        adapter.load_state_dict(states[fork])
        for number in range(fork + 1, len(states)):
            step(adapter, number, hp)
        assert digest(adapter.state_dict()) == digest(states[-1])
        assert adapter.evaluate() == metrics[-1]
    adapter.close()


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "module__width": trial.suggest_categorical("width", [4, 8]),
        "lr": s.multistep(0.1, [trial.suggest_categorical("drop_at", [2, 4])], gamma=0.1),
        "optimizer__momentum": s.piecewise({0: 0.9, 3: 0.5}),
        "batch_size": s.piecewise({0: 16, 4: 32}),
    }


@pytest.mark.ci
def test_a_search_shares_epochs_and_loads_the_skorch_net_of_each_trial(tmp_path: Path) -> None:
    found = []
    for sharing in (True, False):
        sampler = optuna.samplers.GridSampler({"width": [4, 8], "drop_at": [2, 4]}, seed=0)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        result = hpstage.optimize(
            study, SkorchTrainable(classifier(Averaging()), X, Y), space, metric="valid_acc", steps=STEPS,
            executor=hpstage.InlineExecutor(), store=tmp_path / str(sharing), sharing=sharing,
        )  # fmt: skip
        found.append(result)
    assert found[0].savings.steps_trained == 2 * (6 + 4) and found[1].savings.steps_trained == 4 * 6
    for one, other in zip(found[0].study.trials, found[1].study.trials, strict=True):
        weights = found[1].load(other).model.state_dict()
        assert all(torch.equal(value, weights[key]) for key, value in found[0].load(one).model.state_dict().items())
    net = found[0].load(found[0].best_trial).parts["training"].net
    assert net.predict(X).shape == Y.shape and net.optimizer_.param_groups[0]["momentum"] == 0.5
    assert net.history[-1, "valid_acc"] == found[0].best_value
    assert isinstance(found[0].best_model(), Net)


@pytest.mark.ci
def test_two_workers_give_the_values_and_weights_of_one_worker(tmp_path: Path) -> None:
    found = []
    for workers in (1, 2):
        sampler = optuna.samplers.GridSampler({"width": [4, 8], "drop_at": [2, 4]}, seed=0)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        result = hpstage.optimize(
            study, SkorchTrainable(classifier(Averaging()), X, Y), space, metric="valid_acc", steps=STEPS,
            executor=DaskExecutor(n_workers=workers), store=tmp_path / str(workers),
        )  # fmt: skip
        states = [result.load(trial).model.state_dict() for trial in study.trials]
        found.append(([trial.value for trial in study.trials], [digest(dict(state)) for state in states]))
    assert found[0] == found[1]


def test_skorch_callbacks_that_print_or_save_are_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    net = classifier(PrintLog(), ("checkpoint", Checkpoint(dirname=tmp_path)), verbose=3)
    adapter: Any = as_trainable(SkorchTrainable(net, X, Y))
    adapter.setup({})
    adapter.train(0, {})
    assert adapter.evaluate().keys() == {"train_loss", "valid_loss", "valid_acc"}
    adapter.close()
    assert "PrintLog is not used" in caplog.text and "Checkpoint is not used" in caplog.text
    assert not [*tmp_path.iterdir()]


class OwnLoop(NeuralNetClassifier):  # type: ignore[misc]
    def fit_loop(self, *args: Any, **kwargs: Any) -> Any:
        return super().fit_loop(*args, **kwargs)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda: Net(), "net is a Net; it must be a net of skorch"),
        (lambda: classifier().initialize(), "net is initialized already"),
        (lambda: classifier(compile=True), "compile=True"),
        (lambda: OwnLoop(Net), r"OwnLoop overrides fit_loop\(\)"),
        (lambda: classifier(EarlyStopping(load_best=True)), "EarlyStopping has load_best=True"),
        (lambda: classifier(LoadInitState(Checkpoint())), "LoadInitState loads the state of another training"),
    ],
)
def test_a_skorch_net_that_cannot_be_trained_epoch_by_epoch_is_refused_by_name(net: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SkorchTrainable(net(), X, Y)


SCHEDULED = [{"lr": 0.1}, {"lr": 0.01}]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("net", "hps", "message"),
    [
        (
            classifier(),
            [{"module__width": 4}, {"module__width": 8}],
            "'module__width' changes from 4 to 8, but is read",
        ),
        (
            classifier(LRScheduler("StepLR", step_size=2)),
            SCHEDULED,
            "'lr' follows both a schedule and the callback LRSched",
        ),
        (classifier(), [{"widht": 4}], "does not take these hyperparameters: .*widht"),
        (classifier(), [{"module__widht": 4}], "does not take these hyperparameters: .*widht"),
        (classifier(), [{"max_epochs": 4}], "A step is an epoch: let it return 'steps'"),
    ],
)
def test_unknown_or_unchangeable_hyperparameters_of_skorch_are_refused(net: Any, hps: Any, message: str) -> None:
    adapter: Any = as_trainable(SkorchTrainable(net, X, Y))
    adapter.setup(hps[0])
    for number, hp in enumerate(hps[:-1]):
        adapter.train(number, hp)
    with pytest.raises(UsageError, match=message):
        adapter.train(len(hps) - 1, hps[-1])
    adapter.close()
