"""Branches of models: weights and metrics bit for bit those of the trial trained without sharing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

import hpstage
from hpstage import schedule as s
from hpstage.errors import UsageError
from hpstage.search.results.trial import TrainedTrial
from hpstage.training.code.unread import read_at_first

optuna.logging.set_verbosity(optuna.logging.ERROR)
STEPS = 12


class Line(hpstage.torch.TorchTrainable):
    """Reads ``width`` where the model is made, ``dropout`` in each step, and the optimizer's fields follow."""

    device = "cpu"
    batch_size = 8

    def dataset(self) -> torch.utils.data.TensorDataset:
        x = torch.linspace(-1, 1, 40).unsqueeze(1)
        return torch.utils.data.TensorDataset(x, torch.sin(3 * x))

    def model(self, hp: Any) -> torch.nn.Module:
        width = int(hp["width"])
        return torch.nn.Sequential(torch.nn.Linear(1, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))

    def optimizer(self, model: torch.nn.Module, hp: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"], momentum=hp["momentum"])

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        x = torch.nn.functional.dropout(batch[0], float(self.hp["dropout"]))  # type: ignore[arg-type]
        return torch.nn.functional.mse_loss(model(x), batch[1])

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        x, y = self.dataset().tensors
        return {"loss": torch.nn.functional.mse_loss(model(x), y).item()}


HP = {"lr": s.cosine(0.1, T_max=STEPS), "momentum": 0.9, "width": 4, "dropout": 0.1, "batch_size": 8, "seed": 0}


def train(store: Path, hp: Any, trainable: object = None, steps: int = STEPS, **options: Any) -> TrainedTrial:
    executor = hpstage.InlineExecutor()
    trained = hpstage.train(trainable or Line(), hp, steps=steps, store=store, executor=executor, **options)
    assert isinstance(trained, TrainedTrial)
    return trained


def assert_same(one: TrainedTrial, other: TrainedTrial) -> None:
    assert one.metrics[one.step()] == other.metrics[other.step()]
    mine, theirs = one.weights(part=""), other.weights(part="")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.ci
@pytest.mark.parametrize("at", [0, 1, 5, STEPS])
@pytest.mark.parametrize(
    "values",
    [{"lr": 0.03}, {"lr": s.linear(0.05), "batch_size": 16}, {"momentum": 0.5, "dropout": 0.5}, {"seed": 7}],
    ids=lambda values: "-".join(values),
)
def test_a_branch_of_a_run_equals_a_run_trained_from_scratch_with_the_same_schedules(
    at: int, values: dict[str, Any], tmp_path: Path
) -> None:
    run = train(tmp_path / "one", HP, checkpoint_every=5)
    branch = run.branch(at, steps=STEPS + 4, executor=hpstage.InlineExecutor(), **values)
    assert isinstance(branch, TrainedTrial)
    assert_same(branch, train(tmp_path / "other", branch.schedules, steps=STEPS + 4))


@pytest.mark.parametrize("at", [1, STEPS])
def test_a_branch_after_step_0_may_not_change_a_hyperparameter_that_only_model_reads(at: int, tmp_path: Path) -> None:
    run = train(tmp_path, HP)
    with pytest.raises(UsageError, match=r"'width' cannot change at step \d+ of trial runs/0: .* at step 0"):
        run.branch(at, width=8, steps=STEPS + 4, executor=hpstage.InlineExecutor())
    wider = run.branch(0, width=8, executor=hpstage.InlineExecutor())
    assert isinstance(wider, TrainedTrial)
    assert wider.weights()["0.weight"].shape == (8, 1)


class Passing(Line):
    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * dict(**self.hp).get("scale", 1.0)  # type: ignore[operator,return-value]


@pytest.mark.parametrize("name", ["lr", "momentum", "dropout", "batch_size", "seed", "weight_decay", "unknown"])
def test_a_hyperparameter_that_a_step_may_read_is_not_fixed_at_step_0(name: str) -> None:
    assert not read_at_first(Line(), name)


class FiveMethods:
    def setup(self, hp: Any) -> None:
        self.width, self.depth = hp["width"], hp["depth"]

    def train(self, step: int, hp: Any) -> None:
        self.out = self.model(hp)

    def model(self, hp: Any) -> float:
        return float(hp["depth"])


def test_a_hyperparameter_of_a_plain_trainable_is_fixed_at_step_0_if_only_setup_reads_it() -> None:
    assert read_at_first(FiveMethods(), "width")
    assert not read_at_first(FiveMethods(), "depth")


def test_no_hyperparameter_is_fixed_at_step_0_if_the_code_passes_all_of_them_on() -> None:
    assert read_at_first(Line(), "width")
    assert not read_at_first(Passing(), "width")


def test_a_diff_of_two_runs_names_the_first_tensor_that_differs(tmp_path: Path) -> None:
    run = train(tmp_path, HP, checkpoint_every=5)
    branch = run.branch(5, lr=0.03, executor=hpstage.InlineExecutor())
    assert isinstance(branch, TrainedTrial)
    assert run.diff(branch).tensor == (STEPS, "model.0.weight")


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning")
def test_a_branch_of_a_lightning_run_equals_a_run_trained_from_scratch(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    from hpstage.torch.lightning import LightningTrainable
    from tests.torch.lit import CPU, LitShapes, ShapesDataModule

    def make() -> LightningTrainable:
        return LightningTrainable(LitShapes, datamodule=ShapesDataModule(), trainer=CPU)

    hp = {"lr": 0.1, "seed": 3}
    run = train(tmp_path / "one", hp, make(), checkpoint_every=5)
    branch = run.branch(7, lr=0.01, executor=hpstage.InlineExecutor())
    assert isinstance(branch, TrainedTrial)
    assert_same(branch, train(tmp_path / "other", {**hp, "lr": s.piecewise({0: 0.1, 7: 0.01})}, make()))

    with pytest.raises(UsageError, match=r"no hyperparameter 'momentum'; .* set defaults = {'momentum': OLD} on"):
        run.branch(5, momentum=0.5)
    made: Any = make()
    made.defaults = {"momentum": 0.9}
    with_momentum = {**run.then({}), "momentum": s.piecewise({0: 0.9, 5: 0.5})}
    changed = train(tmp_path / "one", with_momentum, made)
    assert changed.plan.totals.steps_trained == STEPS + (2 + STEPS - 7) + (STEPS - 5)
    assert_same(changed, train(tmp_path / "again", with_momentum, make()))
