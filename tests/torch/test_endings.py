"""Ordinary training code that ends its training: by break, return, run.stop(), an exception, or a loss that is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn
from torch.utils.data import TensorDataset

import hpstage
from hpstage import Run
from hpstage import schedule as s
from hpstage.errors import HpstageError, StateError
from hpstage.store import MemoryJournal

pytestmark = pytest.mark.sampled(5)

STEPS = 30
X = torch.linspace(-1.0, 1.0, 40).unsqueeze(1)
Y = 3.0 * X + 0.5


def loss_of(model: nn.Module) -> torch.Tensor:
    return nn.functional.mse_loss(model(X), Y)


def one_step(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    chosen = torch.from_numpy(run.indices(len(X), 8).copy())
    loss = nn.functional.mse_loss(model(X[chosen]), Y[chosen])
    loss.backward()
    optimizer.step()
    return loss_of(model).item()


def parts(run: Run) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=float(run.hp["lr"]))  # type: ignore[arg-type]


def breaking(run: Run) -> None:
    model, optimizer = parts(run)
    run.attach(model=model, optimizer=optimizer)
    for _ in run.steps():
        loss = one_step(run, model, optimizer)
        if run.wants_report:
            run.report(loss=loss)
        if loss < 0.4:
            break
    run.report(loss=loss)


def returning(run: Run) -> None:
    model, optimizer = parts(run)
    run.attach(model=model, optimizer=optimizer)
    for _ in run.steps():
        loss = one_step(run, model, optimizer)
        run.report(loss=loss)
        if loss < 0.4:
            return


def stopping(run: Run) -> None:
    model, optimizer = parts(run)
    run.attach(model=model, optimizer=optimizer)
    for _ in run.steps():
        loss = one_step(run, model, optimizer)
        run.report(loss=loss)
        if loss < 0.4:
            run.stop()


def pruning(run: Run) -> None:
    model, optimizer = parts(run)
    run.attach(model=model, optimizer=optimizer)
    for step in run.steps():
        loss = one_step(run, model, optimizer)
        run.report(loss=loss)
        if step == 10 and loss > 0.4:
            raise optuna.TrialPruned(f"loss {loss:.2f}")


class Line(hpstage.torch.TorchTrainable):
    """Ends where its loss is small, or not finite."""

    batch_size = 8
    device = "cpu"

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Linear(1, 1)

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"])

    def dataset(self) -> TensorDataset:
        return TensorDataset(X, Y)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"loss": loss_of(model).item()}


class Stopping(Line):
    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor | None:
        loss = super().update(model, optimizer, batch)
        if loss is not None and loss < 0.4:
            raise hpstage.StopTraining(f"loss {loss:.3f}")
        return loss


def space(trial: optuna.Trial) -> dict[str, object]:
    lr = trial.suggest_categorical("lr", [0.02, 0.1, 0.3])
    return {"lr": s.multistep(lr, [trial.suggest_categorical("drop", [6, 12])], gamma=0.5)}


def search(trainable: object, **options: Any) -> hpstage.Result:
    grid = options.pop("grid", {"lr": [0.02, 0.1, 0.3], "drop": [6, 12]})
    study = optuna.create_study(study_name="study", sampler=optuna.samplers.GridSampler(grid, seed=0))
    return hpstage.optimize(
        study,
        trainable,
        options.pop("space", space),
        metric="loss",
        steps=STEPS,
        n_trials=6,
        executor=options.pop("executor", None) or hpstage.InlineExecutor(),
        store=options.pop("store", None) or MemoryJournal(),
        **options,
    )


def outcome(result: hpstage.Result) -> list[tuple[object, ...]]:
    return [
        (trial.params, trial.state, trial.value, trial.user_attrs["hpstage:steps"], trial.intermediate_values)
        for trial in result.study.trials
    ]


@pytest.mark.ci
@pytest.mark.parametrize("function", [breaking, returning, stopping, pruning, Stopping()], ids=lambda f: str(f)[:20])
def test_training_that_ends_itself_has_the_same_outcome_with_and_without_sharing(function: object) -> None:
    shared, alone = search(function, verify="all"), search(function, sharing=False)
    assert outcome(shared) == outcome(alone)
    ended = [trial for trial in shared.study.trials if "hpstage:ended" in trial.user_attrs]
    assert 0 < len(ended) < 6
    assert {t.state for t in ended} == {TrialState.PRUNED if function is pruning else TrialState.COMPLETE}
    assert all(t.user_attrs["hpstage:steps"] < STEPS for t in ended)
    assert shared.savings.steps_trained < alone.savings.steps_trained


@pytest.mark.ci
@pytest.mark.parametrize("function", [breaking, stopping])
def test_the_model_of_a_trial_that_ended_itself_can_be_loaded(function: Callable[[Run], None], tmp_path: Path) -> None:
    result = search(function, store=tmp_path)
    trial = next(t for t in result.study.trials if "hpstage:ended" in t.user_attrs)
    assert loss_of(result.load(trial).model).item() == trial.value
    assert loss_of(result.load(trial, retrain=True).model).item() == trial.value


def test_a_trial_that_ends_itself_without_metrics_fails_with_the_remedy() -> None:
    def silent(run: Run) -> None:
        model, optimizer = parts(run)
        run.attach(model=model, optimizer=optimizer)
        for _ in run.steps():
            loss = one_step(run, model, optimizer)
            if run.wants_report:
                run.report(loss=loss)
            if loss < 0.4:
                break

    result = search(silent)
    failed = [trial for trial in result.study.trials if trial.state == TrialState.FAIL]
    assert failed
    assert all("without metrics: call run.report(...)" in trial.user_attrs["hpstage:failure"] for trial in failed)


@pytest.mark.parametrize("caught", [StateError, HpstageError])
def test_a_function_that_stops_only_if_a_report_is_wanted_is_refused(caught: type[Exception]) -> None:
    def low(run: Run, loss: float) -> bool:
        if run.wants_report:
            run.report(loss=loss)
        return run.wants_report and loss < 0.4

    def measuring(run: Run) -> None:
        model, optimizer = parts(run)
        run.attach(model=model, optimizer=optimizer)
        for _ in run.steps():
            if low(run, one_step(run, model, optimizer)):
                break

    result = search(measuring, catch=(caught,))
    failed = [trial for trial in result.study.trials if trial.state == TrialState.FAIL]
    assert failed
    assert all("if a report is wanted there" in trial.user_attrs["hpstage:failure"] for trial in failed)


def diverging(trial: optuna.Trial) -> dict[str, object]:
    return {"lr": s.multistep(trial.suggest_categorical("lr", [0.1, 1e30]), [4], gamma=1.0)}


@pytest.mark.parametrize("finite", [True, False])
def test_a_loss_that_is_not_finite_prunes_a_trial_unless_terminate_on_nan_is_false(
    finite: bool, caplog: pytest.LogCaptureFixture
) -> None:
    line = Line()
    line.terminate_on_nan = finite
    result = search(line, space=diverging, grid={"lr": [0.1, 1e30]})
    bad = next(trial for trial in result.study.trials if trial.params["lr"] == 1e30)
    if finite:
        assert bad.state == TrialState.PRUNED
        assert bad.user_attrs["hpstage:steps"] < 5
        assert "the training loss is" in bad.user_attrs["hpstage:ended"]
        assert caplog.text.count("is pruned: the training loss is") == 1
    else:
        assert bad.state == TrialState.FAIL
        assert "loss is NaN" in bad.user_attrs["hpstage:failure"]
    assert math.isfinite(result.best_value)


def test_diverging_trials_are_logged_twice_and_further_ones_are_suppressed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def space(trial: optuna.Trial) -> dict[str, object]:
        return {"lr": s.piecewise({0: 0.1, trial.suggest_categorical("at", [2, 3, 4]): 1e30})}

    search(Line(), space=space, grid={"at": [2, 3, 4]})
    messages = [record.getMessage() for record in caplog.records if "pruned" in record.getMessage()]
    assert len(messages) == 2
    assert "is pruned: the training loss is" in messages[0]
    assert "is pruned, too, as trial " in messages[1]


@pytest.mark.filterwarnings("ignore:`constraints_func` has been deprecated:FutureWarning")
def test_metrics_of_a_trial_are_user_attributes_that_constraints_can_read() -> None:
    def constraints(trial: optuna.trial.FrozenTrial) -> list[float]:
        return [trial.user_attrs["twice"] - 0.3]

    class Twice(Line):
        def evaluate(self, model: nn.Module) -> Mapping[str, float]:
            loss = loss_of(model).item()
            return {"loss": loss, "twice": 2.0 * loss}

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, constraints_func=constraints))
    hpstage.optimize(
        study,
        Twice(),
        space,
        metric="loss",
        steps=STEPS,
        n_trials=4,
        executor=hpstage.InlineExecutor(),
        store=MemoryJournal(),
    )
    for trial in study.trials:
        assert trial.user_attrs["twice"] == 2.0 * trial.user_attrs["loss"] == 2.0 * trial.value  # type: ignore[operator]
        assert trial.system_attrs["constraints"] == (trial.user_attrs["twice"] - 0.3,)
