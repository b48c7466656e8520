"""A trial that learns nothing in its first steps is warned of, once, whatever its trainable is; others are not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import hpstage
from hpstage import schedule as s
from hpstage.execution.first_steps import RATES, STEPPED, STILL, UNSTEPPED
from hpstage.torch import TorchTrainable

pytestmark = pytest.mark.sampled(10)

X = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class Fit(TorchTrainable):
    """A line, whose learning rate a scheduler of its own sets to a multiple of ``rate``."""

    batch_size = 8

    def __init__(self, factor: Callable[[int], float] = lambda step: 1.0, rate: float = 0.1) -> None:
        self.factor, self.rate = factor, rate

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Linear(3, 1)

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(model.parameters(), lr=self.rate)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        return optimizer

    def dataset(self) -> Any:
        return TensorDataset(X, Y)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y)

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = super().update(model, optimizer, batch)
        self.scheduler.step()
        return loss

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"loss": nn.functional.mse_loss(model(X), Y).item()}


class Following(Fit):
    """Its learning rate is the hyperparameter ``lr``."""

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"])

    update = TorchTrainable.update


class WithoutRate(torch.optim.Optimizer):
    """Decides how far to go by itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight -= 0.01 * weight.grad.sign()


class Swaps(WithoutRate):
    """Weights change places, as those at the ends of a range may."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight.copy_(weight.roll(1, -1))


class Alternates(WithoutRate):
    """Weights jump over the best ones, and back again."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight.neg_()


class By(Following):
    def __init__(self, kind: type[WithoutRate]) -> None:
        super().__init__()
        self.kind = kind

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return self.kind(model.parameters())


class Unrated(Following):
    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return WithoutRate(model.parameters())


class Accumulating(Fit):
    every = 16

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        loss = self.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.count = getattr(self, "count", 0) + 1
        if self.count % self.every == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()


class Forgetful(Accumulating):
    every = 10_000


class HalfFrozen(Fit):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        model[0].requires_grad_(requires_grad=False)
        return model


class Evaluating(Fit):
    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """Train nothing: hyperparameters are of the evaluation."""

    terminate_on_nan = False


def loop(run: Any) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run.attach(model=model, optimizer=optimizer)
    for _ in run.steps():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(X), Y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        run.report(loss=loss.item())


class InNumPy:
    """Five methods; ``keeps`` says whether a step is kept, as an assignment to another name is not."""

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps

    def setup(self, hp: Mapping[str, Any]) -> None:
        self.weight = np.zeros(3)

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        weight = self.weight + 0.1
        if self.keeps:
            self.weight = weight

    def evaluate(self) -> Mapping[str, float]:
        return {"loss": float(self.weight.sum())}

    def state_dict(self) -> object:
        return {"weight": self.weight}

    def load_state_dict(self, state: Any) -> None:
        self.weight = state["weight"]


class WithTorch(InNumPy):
    """The same, with an optimizer of torch among its attributes."""

    def setup(self, hp: Mapping[str, Any]) -> None:
        self.line = nn.Linear(3, 1)
        self.adam = torch.optim.Adam(self.line.parameters(), lr=0.0)

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        self.adam.zero_grad()
        nn.functional.mse_loss(self.line(X), Y).backward()
        self.adam.step()

    def evaluate(self) -> Mapping[str, float]:
        return {"loss": self.line.bias.sum().item()}

    def state_dict(self) -> object:
        return {"line": self.line.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.line.load_state_dict(state["line"])
        self.adam.load_state_dict(state["adam"])


def logged(
    trainable: object,
    store: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    steps: int = 12,
    metric: str = "loss",
    hp: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return what a search of two trials warns of."""
    with caplog.at_level(logging.WARNING, "hpstage"):
        hpstage.optimize(
            optuna.create_study(study_name="study", sampler=optuna.samplers.GridSampler({"seed": [1, 2]})),
            trainable,
            lambda trial: {"seed": trial.suggest_int("seed", 1, 2), **(hp or {})},
            metric=metric,
            steps=steps,
            store=store,
            executor=hpstage.InlineExecutor(),
        )
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if any(known in text for known in (RATES, STEPPED, STILL, UNSTEPPED))]


@pytest.mark.parametrize(
    ("make", "steps", "what"),
    [
        (lambda: Fit(lambda step: 0.0), 12, RATES),
        (lambda: Fit(lambda step: float("nan")), 12, RATES),
        (lambda: Fit(rate=1e-30), 12, STEPPED),
        (Forgetful, 130, UNSTEPPED),
        (lambda: loop, 12, RATES),
        (lambda: InNumPy(keeps=False), 12, STILL),
        (lambda: WithTorch(keeps=True), 12, RATES),
    ],
    ids=["0", "NaN", "too small", "no step", "function", "numpy", "five methods"],
)
def test_a_trial_that_learns_nothing_is_warned_about_once(
    make: Callable[[], object], steps: int, what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert logged(make(), tmp_path, caplog, steps=steps) == [f"Trial 0: {what}"]


@pytest.mark.parametrize(
    ("make", "steps", "hp"),
    [
        (Fit, 12, {}),
        (lambda: Fit(lambda step: step / 10), 12, {}),
        (lambda: Fit(lambda step: float(step > 5)), 12, {}),
        (Accumulating, 12, {}),
        (Accumulating, 130, {}),
        (HalfFrozen, 12, {}),
        (Evaluating, 12, {}),
        (lambda: Fit(lambda step: 0.0), 2, {}),
        (Unrated, 12, {}),
        (lambda: By(Swaps), 12, {}),
        (lambda: By(Alternates), 13, {}),
        (Following, 12, {"lr": s.piecewise({0: 0.0, 10: 0.1})}),
        (Following, 12, {"lr": 0}),
        (lambda: InNumPy(keeps=True), 12, {}),
        (lambda: InNumPy(keeps=False), 12, {"learning_rate": 0.0}),
    ],
    ids=[
        *("usual", "warm-up from 0", "late", "accumulation", "long accumulation", "half frozen", "evaluation only"),
        *("two steps", "no rate", "swapped", "alternating", "frozen at first", "frozen", "numpy", "numpy, frozen"),
    ],
)
@pytest.mark.ci_one_in(2)
def test_a_trial_that_learns_later_or_is_frozen_on_purpose_is_not_warned_about(
    make: Callable[[], object],
    steps: int,
    hp: Mapping[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert logged(make(), tmp_path, caplog, steps=steps, hp=hp) == []


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec:FutureWarning")
def test_a_lightning_module_that_learns_nothing_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("lightning")
    from hpstage.torch.lightning import LightningTrainable
    from tests.torch.lit import CPU, LitShapes, ShapesDataModule

    trainable = LightningTrainable(LitShapes, ShapesDataModule(), trainer=CPU)
    assert logged(trainable, tmp_path / "usual", caplog, metric="val_loss", hp={"lr": 0.1}) == []

    class Still(LitShapes):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)]

    trainable = LightningTrainable(Still, ShapesDataModule(), trainer=CPU)
    assert logged(trainable, tmp_path / "still", caplog, metric="val_loss", hp={"lr": 0.1}) == [f"Trial 0: {RATES}"]


def test_a_hugging_face_trainer_that_learns_nothing_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("transformers")
    from tests.torch.hugging_face import arguments, setup

    usual, still = setup(), setup(args=arguments(learning_rate=0.0))
    assert logged(usual, tmp_path / "usual", caplog, steps=8, metric="eval_loss") == []
    assert logged(still, tmp_path / "still", caplog, steps=8, metric="eval_loss") == [f"Trial 0: {RATES}"]
