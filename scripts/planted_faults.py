"""Trainables with a planted fault each: something that training depends on, and that no ``state_dict()`` holds.

hpstage captures most of them, or refuses them by name. ``scripts/bench_audit.py`` switches that off, and shows that an
audit, which knows nothing of their kinds, finds them all the same.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hpstage

LOSSES: list[float] = []
SCALES: dict[str, float] = {}


class Small(hpstage.torch.TorchTrainable):
    """Exact: a regression of 64 numbers. Its model counts the batches that it was trained on.

    Args:
        folder: where a fault may write.
    """

    version = "1"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def dataset(self) -> TensorDataset:
        made = torch.Generator().manual_seed(0)
        x = torch.randn(64, 6, generator=made, dtype=torch.float32)
        return TensorDataset(x, x.sin().sum(1, keepdim=True))

    def model(self, hp: dict[str, float]) -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 8, dtype=torch.float32), nn.Tanh(), nn.Linear(8, 1, dtype=torch.float32))
        model.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.begin(model)
        return model

    def optimizer(self, model: nn.Module, hp: dict[str, float]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"], momentum=0.9)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        step = int(model.batches)
        model.batches += 1
        return self.spoil(step, model, nn.functional.mse_loss(model(x), y))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        x, y = self.dataset().tensors
        return {"loss": nn.functional.mse_loss(model(x), y).item()}

    def begin(self, model: nn.Module) -> None:
        """Do what a fault does with a new model."""

    def spoil(self, step: int, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss, as changed by a fault."""
        return loss


class LateAverage(Small):
    """Averaged weights from the 7th step on, towards which training is pulled."""

    def begin(self, model: nn.Module) -> None:
        self.average = None

    def spoil(self, step: int, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        if step < 7:
            return loss
        weight = model[0].weight
        now = weight.detach().clone()
        self.average = now if self.average is None else 0.9 * self.average + 0.1 * now
        return loss + (weight - self.average).square().sum()


class LeakingGlobal(Small):
    """A global list of all losses, of every trial."""

    def spoil(self, step: int, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        LOSSES.append(loss.item())
        return loss * (1.0 + len(LOSSES) % 7 / 100)


class SecondOptimizer(Small):
    """A second optimizer, whose momentum no state holds."""

    def begin(self, model: nn.Module) -> None:
        self.second = torch.optim.SGD([model[2].bias], lr=0.01, momentum=0.9)

    def spoil(self, step: int, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        self.second.zero_grad()
        loss.backward(retain_graph=True)
        self.second.step()
        model.zero_grad()
        return loss * 1.0


class CounterInC(Small):
    """A counter that is an object written in C."""

    def begin(self, model: nn.Module) -> None:
        self.numbers = itertools.count()

    def spoil(self, step: int, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        return loss * (1.0 + next(self.numbers) / 1000)


class LateHook(Small):
    """A hook that is registered in the 6th step."""

    def spoil(self, step: int, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        if step == 5:
            model[0].register_forward_hook(lambda module, given, result: result * 1.1)
        return loss


class CachedObject(Small):
    """A scale that the first trial computes, and a cache keeps."""

    def spoil(self, step: int, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.scale = model[0].weight.detach().abs().mean().item()
        return loss * (1.0 + self.scale)


class DefaultDtype(Small):
    """A default type of numbers that some trials set, for those that follow as well."""

    def spoil(self, step: int, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        if self.hp["lr"] == 0.1:
            torch.set_default_dtype(torch.float64)
        third = torch.full((), 1 / 3).item()
        return loss * (1.0 + third * 1e8 % 1.0)


class ClockInLoss(Small):
    """The time of day in the loss."""

    def spoil(self, step: int, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        return loss * (1.0 + time.time() % 1.0)


class OrderOfADict(Small):
    """A sum in the order in which trials have filled a dict."""

    def spoil(self, step: int, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        for lr in (self.hp["lr"], 0.2, 0.1, 0.05):
            SCALES.setdefault(f"{lr:g}", lr / 3)
        return loss * (1.0 + sum(SCALES.values()) * 1e8 % 1.0)


class BufferAliasing(Small):
    """A statistic that is a buffer of the model until the model replaces that in the 6th step."""

    def begin(self, model: nn.Module) -> None:
        model.register_buffer("mean", torch.zeros(()))
        self.mean = model.mean

    def spoil(self, step: int, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        if step == 5:
            model.mean = model.mean.clone()
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss + (self.mean - model.mean) * model[2].bias.sum()


class OwnGenerator(Small):
    """A generator of its own, from which each step draws."""

    def begin(self, model: nn.Module) -> None:
        self.generator = random.Random(0)

    def spoil(self, step: int, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        return loss * (1.0 + self.generator.random() / 10)


class FileReadBack(Small):
    """A counter in a file."""

    def spoil(self, step: int, model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
        file = self.folder / "counter"
        count = int(file.read_text()) if file.exists() else 0
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_text(str(count + 1))
        aside.rename(file)
        return loss * (1.0 + count % 13 / 100)


FAULTS: dict[str, type[Small]] = {
    "late EMA": LateAverage,
    "leaking global": LeakingGlobal,
    "second optimizer's momentum": SecondOptimizer,
    "counter in a C object": CounterInC,
    "late hook": LateHook,
    "cached object": CachedObject,
    "default dtype set by one trial": DefaultDtype,
    "clock in the loss": ClockInLoss,
    "order of a dict": OrderOfADict,
    "buffer aliasing": BufferAliasing,
    "generator of its own": OwnGenerator,
    "file written and read back": FileReadBack,
}
