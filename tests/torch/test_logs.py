"""Training logs: a trial's log is that of the trial trained without sharing, whatever the search made of it."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from torch import nn

import hpstage
from hpstage import schedule as s
from hpstage.errors import TrainingError
from hpstage.schedule import Scalar
from hpstage.training.step_log import Recorder, recording
from hpstage.training.trainables import as_trainable

pytestmark = pytest.mark.sampled(5)

STEPS = 10
GRID = {"drop_at": [3, 6], "gamma": [0.1, 0.5]}


class Line(hpstage.torch.TorchTrainable):
    """A line is fitted to noise, with dropout; it says in each step what it does."""

    batch_size = 8
    version = "1"
    logs = True
    fails_at: int | None = None

    def dataset(self) -> torch.utils.data.TensorDataset:
        x = torch.linspace(-1, 1, 64).reshape(16, 4)
        return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))

    def model(self, hp: Mapping[str, Scalar]) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1))

    def optimizer(self, model: nn.Module, hp: Mapping[str, Scalar]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = (model(x) - y).square().mean()
        if self.logs:
            self.log("train_loss", loss)
            hpstage.log("rate", self.hp["lr"])
            print("a step under", self.hp["lr"])  # noqa: T201  what users do
        return loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.log("nothing is recorded in evaluate()", 1.0)
        return {"loss": float(sum(parameter.square().sum() for parameter in model.parameters()))}


def space(trial: optuna.Trial) -> dict[str, Any]:
    drop, gamma = (trial.suggest_categorical(name, values) for name, values in GRID.items())
    return {"lr": s.multistep(0.1, milestones=[drop], gamma=gamma)}


def search(trainable: object, store: Path | None, **options: Any) -> hpstage.Result:
    study = optuna.create_study(
        study_name="line", sampler=optuna.samplers.GridSampler(GRID, seed=0), storage=options.pop("storage", None),
        load_if_exists=True,
    )  # fmt: skip
    kept = {"metric": "loss", "steps": STEPS, "n_trials": 4, "executor": hpstage.InlineExecutor(), "store": store}
    return hpstage.optimize(study, trainable, space, **(kept | options))


def alone(trainable: object, trial: hpstage.TrainedTrial, steps: int = STEPS) -> dict[str, dict[int, float]]:
    """What a trial logs that is trained by itself."""
    loop, recorder = as_trainable(trainable), Recorder(0)
    loop.setup(trial.hyperparameters(0))
    for step in range(steps):
        recorder.step = step
        with recording(recorder):
            loop.train(step, trial.hyperparameters(step))
    taken = recorder.take(steps)
    assert taken is not None
    return {name: dict(zip(found.steps, found.values, strict=True)) for name, found in taken.series.items()}


def check_logs(result: hpstage.Result, make: Any, *, steps: int = STEPS) -> None:
    for number in range(len(result.study.trials)):
        assert result.log(number).values == alone(make(), result.trial(number), steps)


@pytest.fixture
def result(tmp_path: Path) -> hpstage.Result:
    return search(Line(), tmp_path)


def test_the_log_of_each_trial_equals_that_of_training_without_sharing(result: hpstage.Result) -> None:
    assert result.savings.steps_trained < 4 * STEPS
    check_logs(result, Line)
    assert result.log(0).values.keys() == {"train_loss", "rate"}
    assert hpstage.open(result.store).trial(0).log() == result.trial(0).log()


def test_the_log_of_a_trial_has_the_printed_output_of_each_step_once(result: hpstage.Result) -> None:
    for number in range(4):
        trial = result.trial(number)
        rates = [trial.hyperparameters(step)["lr"] for step in range(STEPS)]
        assert result.log(number).output == "".join(f"a step under {rate}\n" for rate in rates)


def test_logging_does_not_change_training(tmp_path: Path) -> None:
    silent = Line()
    silent.logs = False
    with_logs, without = search(Line(), tmp_path / "a"), search(silent, tmp_path / "b")
    digests = [
        {
            state.ref: state.digest for state in result.plan.kept.values()
        }  # their code is distinguished by its attributes
        for result in (with_logs, without)
    ]
    assert digests[0] == digests[1] != {}
    assert [trial.value for trial in with_logs.study.trials] == [trial.value for trial in without.study.trials]
    assert without.log(0).values == {}
    assert without.log(0).output == ""


def test_steps_that_are_trained_again_are_in_the_log_once(tmp_path: Path) -> None:
    first = search(Line(), tmp_path)
    assert first.checkpoints is not None
    before = [first.log(number) for number in range(4)]
    for key in list(first.checkpoints.keys()):
        first.checkpoints.delete(key)
    again = search(Line(), tmp_path, steps=STEPS + 3)  # a study of its own, beyond where the first has trained
    assert again.savings.steps_trained > 0
    check_logs(again, Line, steps=STEPS + 3)
    assert [first.log(number) for number in range(4)] == before


@pytest.mark.usefixtures("own_files")
def test_a_damaged_log_file_is_left_out_with_a_warning(
    result: hpstage.Result, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = result.log(0)
    last = result.plan.key(result.trial(0).planned.node_at(STEPS), STEPS)
    path = tmp_path / "checkpoints" / ".logs" / last[:2] / last
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        rest = result.log(0)
    assert "cannot be read and is left out" in caplog.text
    assert rest.values["rate"].items() < whole.values["rate"].items()
    assert result.load(0).model is not None
    again = search(Line(), tmp_path)
    assert again.savings.steps_trained == 0


@pytest.mark.usefixtures("own_files")
def test_training_continues_if_logs_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoints").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".logs").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        result = search(Line(), tmp_path)
    assert [trial.state.name for trial in result.study.trials] == ["COMPLETE"] * 4
    assert caplog.text.count("A training log is lost") == 1


class Failing(Line):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        if self.hp["lr"] < 0.02:
            print("about to fail")  # noqa: T201  what users do
            self.log("last words", 1.0)
            raise RuntimeError("it fails")
        return loss


def test_the_log_of_a_failed_step_is_kept(tmp_path: Path) -> None:
    result = search(Failing(), tmp_path, catch=(RuntimeError,))
    for trial in result.study.trials:
        log = result.log(trial)
        if trial.params["gamma"] == 0.1:
            at = trial.params["drop_at"]
            assert trial.state.name == "FAIL"
            assert log.output.endswith("about to fail\n")
            assert log.values["last words"] == {at: 1.0}
            assert [*log.values["train_loss"]] == list(range(at + 1))
        else:
            assert "last words" not in log.values


class Diverging(Line):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch) * (torch.nan if self.hp["lr"] < 0.02 else 1.0)
        self.log("of it", loss)
        return loss


def test_a_nan_loss_that_ends_a_trial_is_only_in_the_log_of_that_trial(tmp_path: Path) -> None:
    result = search(Diverging(), tmp_path)
    for trial in result.study.trials:
        strange = {step for step, value in result.log(trial).values["of it"].items() if value != value}
        assert strange == ({trial.params["drop_at"]} if trial.params["gamma"] == 0.1 else set())


def train(run: hpstage.Run) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    run.attach(model=nn.ParameterList([weight]), optimizer=optimizer)
    for step in run.steps():
        optimizer.zero_grad()
        loss = (weight * torch.rand(3)).square().sum()
        loss.backward()
        optimizer.step()
        run.log("loss", loss)
        run.log("loss", loss * 3)
        print("step", step)  # noqa: T201  what users do
        if run.wants_report:
            run.report(loss=float(weight.detach().sum()))


class Counting:
    """An object with five methods."""

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        self.total = np.zeros(())

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        self.total += hp["lr"]
        hpstage.log("total", self.total)

    def evaluate(self) -> dict[str, float]:
        return {"loss": float(self.total)}

    def state_dict(self) -> object:
        return self.total

    def load_state_dict(self, state: object) -> None:
        self.total = np.array(state)


@pytest.mark.parametrize("make", [lambda: train, Counting], ids=["function", "object"])
def test_training_functions_and_plain_objects_have_logs(tmp_path: Path, make: Any) -> None:
    result = search(make(), tmp_path)
    check_logs(result, make)
    if make() is train:
        assert result.log(1).output == "".join(f"step {step}\n" for step in range(STEPS))


def test_the_data_frame_of_a_log_has_a_column_for_each_logged_name(result: hpstage.Result) -> None:
    pytest.importorskip("pandas")
    frame = result.log(0).frame()
    assert list(frame.columns) == ["rate", "train_loss"]
    assert list(frame.index) == list(range(STEPS))
    assert frame["train_loss"].to_dict() == result.log(0).values["train_loss"]


class Loud(Line):
    stateless = ("handler",)

    def model(self, hp: Mapping[str, Scalar]) -> nn.Module:
        print("building")  # noqa: T201  what users do
        self.handler = logging.StreamHandler(sys.stderr)
        return super().model(hp)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        sys.stderr.write("to standard error\n")
        return super().loss(model, batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("evaluated", stacklevel=1)
        return super().evaluate(model)


def test_standard_output_and_standard_error_are_recorded_and_still_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = dict(vars(sys.stdout)), dict(vars(sys.stderr))
    # What a warning is written by is pytest's here, and Python's outside of tests.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "showwarning", lambda message, *_: sys.stderr.write(f"a warning: {message}\n"))
        result = search(Loud(), tmp_path)
    assert (dict(vars(sys.stdout)), dict(vars(sys.stderr))) == before
    written = capsys.readouterr()
    for number in range(4):
        output = result.log(number).output
        assert output.count("building\n") == 1
        assert output.startswith("building\nto standard error\na step under 0.1\n")
        assert output.count("to standard error\n") == output.count("a step under") == STEPS
        assert "a warning: evaluated\n" in output
    assert "building\n" in written.out
    assert "to standard error\n" in written.err


class Holding(Line):
    """It holds standard output, and so does what training makes."""

    def __init__(self) -> None:
        self.out = sys.stdout

    def model(self, hp: Mapping[str, Scalar]) -> nn.Module:
        model = super().model(hp)
        model.out = sys.stdout  # type: ignore[assignment]
        return model

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.out.write("written to it\n")
        print("printed to it", file=model.out)  # type: ignore[call-overload]
        return super().loss(model, batch)


def test_a_stream_that_a_trainable_holds_is_recorded_and_not_part_of_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    with os.fdopen(read) as reader:
        with os.fdopen(write, "w") as stream:  # as a terminal's, it cannot give its position
            monkeypatch.setattr(sys, "stdout", stream)
            result = search(Holding(), tmp_path, verify="all")
            monkeypatch.undo()
        written = reader.read()
    assert [trial.state.name for trial in result.study.trials] == ["COMPLETE"] * 4
    assert result.plan.differences == []
    for number in range(4):
        output = result.log(number).output
        assert output.count("written to it\n") == output.count("printed to it\n") == output.count("a step") == STEPS
    assert written.count("written to it\n") >= result.savings.steps_trained


def test_logging_a_tensor_that_is_not_a_scalar_is_an_error_by_name(tmp_path: Path) -> None:
    class Wrong(Line):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            self.log("outputs", model(batch[0]))
            return super().loss(model, batch)

    with pytest.raises(
        TrainingError, match=r"log\('outputs', ...\): a tensor of shape \(8, 1\) and torch.float32 is no"
    ):
        search(Wrong(), tmp_path)


def test_logs_remain_when_checkpoints_are_evicted(tmp_path: Path) -> None:
    result = search(Line(), tmp_path, checkpoint_budget=0)
    assert len(result.plan.kept) < 4
    check_logs(result, Line)
