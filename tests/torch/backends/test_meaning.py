"""Steps of every numerics class mean what the code says: but for rounding they are eager ones, or they are refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

from hpstage.checkpoints.state_tree import digest
from hpstage.errors import StateError, TrainingError, UsageError
from hpstage.torch.backends import meaning
from hpstage.torch.backends.graphed import GraphedBackend
from hpstage.torch.backends.meaning import Meaning
from hpstage.torch.backends.rounding import OtherwiseRounded
from hpstage.torch.loop import TorchLoop
from hpstage.training.identity.torch_settings import torch_settings
from hpstage.training.trainables import as_trainable
from tests.torch.backends.slips import HP, OWN, PROCESS, AugmentedProduct, KnowsOfCompilers, LookedUp, Slip

pytestmark = pytest.mark.sampled(10)

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
CLASSES = [
    "graphed",
    "stacked",
    pytest.param("compiled", marks=[needs_compiler, pytest.mark.ci, pytest.mark.slow]),
]


@pytest.fixture(autouse=True)
def _graphs_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is recorded for a graph is run operation by operation."""
    monkeypatch.setattr(GraphedBackend, "missing", classmethod(lambda cls, device: None))
    monkeypatch.setattr(GraphedBackend, "lower", lambda self, graph, inputs: lookup_backend("aot_eager")(graph, inputs))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(subject: Slip, numerics: str, steps: int = 6, hp: Mapping[str, Any] = HP) -> TorchLoop:
    subject.numerics = numerics
    loop = as_trainable(subject)
    assert isinstance(loop, TorchLoop)
    try:
        loop.setup(hp)
        for step in range(steps):
            loop.train(step, hp)
    except BaseException:
        loop.close()
        raise
    return loop


def outcome(kind: type[Slip], numerics: str, around: Callable[[], AbstractContextManager[Any]]) -> float | str:
    """Return the loss after some steps, or why they were refused."""
    torch._dynamo.reset()
    with around():
        try:
            loop = trained(kind(), numerics)
        except (UsageError, TrainingError) as error:
            return str(error)
        loss = loop.evaluate()["loss"]
        loop.close()
        return loss


# torch's own remarks on backward hooks and saved tensors
@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.one_in(7)
@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("kind", OWN)
def test_recorded_steps_train_like_eager_steps_or_are_refused_with_the_remedy(kind: type[Slip], numerics: str) -> None:
    found = outcome(kind, numerics, nullcontext)
    if isinstance(found, str):
        assert "numerics = 'eager'" in found
        assert re.search(f"numerics = '{numerics}'|torch cannot compile", found)
    else:
        assert found == pytest.approx(outcome(kind, "eager", nullcontext), rel=1e-4)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.one_in(7)
@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("name", PROCESS)
def test_recorded_steps_respect_the_settings_of_the_process_or_are_refused(name: str, numerics: str) -> None:
    found = outcome(Slip, numerics, PROCESS[name])
    assert isinstance(found, str) or found == pytest.approx(outcome(Slip, "eager", PROCESS[name]), rel=1e-3)


@pytest.mark.ci
@pytest.mark.parametrize("numerics", ["graphed", "stacked"])
@pytest.mark.parametrize("name", ["a hook before all steps", "a hook after all steps"])
def test_global_optimizer_hooks_run_in_recorded_steps(name: str, numerics: str) -> None:
    found = outcome(Slip, numerics, PROCESS[name])
    assert found == pytest.approx(outcome(Slip, "eager", PROCESS[name]), rel=1e-4)
    assert found != pytest.approx(outcome(Slip, "eager", nullcontext), rel=1e-2)


@pytest.mark.parametrize("numerics", ["graphed", "stacked"])
def test_a_step_with_augmented_assignments_to_numbers_is_recorded(numerics: str) -> None:
    loop = trained(AugmentedProduct(), numerics)
    assert loop._steps_by().departs
    assert loop._meaning.compared == meaning.STEPS


def test_a_recorded_step_that_differs_from_update_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        StateError,
        match=r"numerics = 'graphed' does not train KnowsOfCompilers as its code says: after 2 steps from the same "
        r"state .* is \S+, and \S+ by update\(\) itself \(\S+ apart; rounding accounts for \S+\).* numerics = 'eager'",
    ):
        trained(KnowsOfCompilers(), "graphed")


@pytest.mark.ci
@pytest.mark.parametrize("kind", [KnowsOfCompilers, LookedUp])
def test_a_recorded_step_that_differs_from_update_is_refused_at_the_first_step(kind: type[Slip]) -> None:
    with pytest.raises(StateError):
        trained(kind(), "graphed", 1)


# --- no false alarm, no trace -----------------------------------------------------------------------------


class LessPrecise(Slip):
    """As on a GPU: eagerly an operation takes TF32, where that is allowed; what is recorded takes another algorithm."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        if not torch.compiler.is_compiling() and torch_settings(torch)[TF32][0]() in ("tf32", True):
            x = torch.from_numpy((x.numpy().view(np.int32) & ~0x1FFF).view(np.float32))
        return self.error(model, (x, y))


TF32 = next(name for name in ("fp32 precision of cuda, conv", "cudnn allow tf32") if name in torch_settings(torch))


def test_a_difference_caused_by_tf32_counts_as_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_settings(torch)[TF32][0]() in ("tf32", True), "torch's default"
    loop = trained(LessPrecise(), "graphed")
    assert loop._meaning.compared == meaning.STEPS
    assert torch_settings(torch)[TF32][0]() in ("tf32", True)
    monkeypatch.setattr(meaning, "full_precision", nullcontext)
    with pytest.raises(StateError, match="does not train LessPrecise as its code says"):
        trained(LessPrecise(), "graphed")


class Busy(Slip):
    """Batch normalisation, dropout, momentum, an unused parameter, and a counter in update()."""

    calls = 0

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 1))
        model.unused = nn.Parameter(torch.ones(3))
        return model

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"], momentum=0.9, weight_decay=0.01)

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        for layer in model:  # type: ignore[attr-defined]
            x = layer(x)
        return x

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.forward(model, batch[0]), batch[1]) * self.hp["gamma"]

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"loss": 0.0}


class Counting(Busy):
    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        self.calls += 1
        loss = super().update(model, optimizer, batch)
        for group in optimizer.param_groups:
            group["momentum"] = 0.9 - 0.1 * (self.calls % 2)
        return loss


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "numerics"), [(Busy, "graphed"), (Busy, "stacked"), (Counting, "graphed")])
def test_comparing_recorded_steps_with_eager_steps_does_not_change_training(
    kind: type[Slip], numerics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = trained(kind(), numerics)
    assert compared._meaning.compared == meaning.STEPS
    found = digest(compared.state_dict())
    compared.close()
    monkeypatch.setattr(Meaning, "is_due", lambda self, hp, batch: False)
    assert found == digest(trained(kind(), numerics).state_dict())


class Loud(Busy):
    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        print("a step")  # noqa: T201
        loss = super().update(model, optimizer, batch)
        self.log("loss", loss)
        return loss


def test_comparing_recorded_steps_with_eager_steps_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    trained(Loud(), "graphed", 3)
    assert capsys.readouterr().out == "a step\n" * 3


def test_each_kind_of_recorded_step_is_compared_with_eager_steps_twice() -> None:
    subject = Busy()
    loop = trained(subject, "graphed", 5)
    assert loop._meaning.compared == 2
    for step in range(5, 9):
        loop.train(step, {**HP, "gamma": 0.6})  # another fraction
    assert loop._meaning.compared == 2
    for step in range(9, 12):
        loop.train(step, {**HP, "layers": 4})
    assert loop._meaning.compared == 4
    for step in range(12, 15):
        loop.train(step, {**HP, "batch_size": 8})
    assert loop._meaning.compared == 6


class WarmingUp(Slip):
    pass


def test_recorded_steps_are_compared_with_eager_steps_until_a_step_changes_the_weights() -> None:
    loop = trained(WarmingUp(), "graphed", 4, {**HP, "lr": 0.0})
    assert loop._meaning.compared == 4
    for step in range(4, 10):
        loop.train(step, HP)
    assert loop._meaning.compared == 6


class Stiff(Slip):
    """A loss whose last bits matter: differences of large numbers, Adam on gradients that are rounding alone."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=hp["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        out = model(batch[0])
        return ((out + 1e4) ** 2 - (batch[1] + 1e4) ** 2).abs().mean() + torch.round(out * 4).sum()


class Halved(Slip):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return super().model(hp).bfloat16()

    def error(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0].bfloat16()), batch[1].bfloat16())

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"loss": 0.0}


class Doubled(Slip):
    """Of double precision, while numbers are not."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return super().model(hp).double()

    def error(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0].double()), batch[1].double()) * (1 - self.hp["beta"] / 0.3)

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {"loss": 0.0}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("numerics", CLASSES)
@pytest.mark.parametrize("kind", [Stiff, Busy, Halved, Doubled])
def test_rounding_in_recorded_steps_raises_no_error(kind: type[Slip], numerics: str) -> None:
    loop = trained(kind(), numerics, 3)
    assert loop._meaning.compared >= meaning.STEPS or not loop._steps_by().departs
    assert loop._meaning.closeness < 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_simulated_rounding_changes_results_by_at_most_two_units_in_the_last_place(dtype: torch.dtype) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    long = x.repeat(2000)  # more numbers than are drawn at first
    with OtherwiseRounded(0):
        y = x * 1.5
        z = long * 1.5
        whole = torch.arange(5.0, dtype=dtype) + 1
    for many, expected in ((y, x * 1.5), (z, long * 1.5)):
        assert (many > expected).sum() > len(many) / 4
        assert (many < expected).sum() > len(many) / 4
        assert torch.allclose(many, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert torch.equal(whole, torch.arange(5.0, dtype=dtype) + 1)
