"""An oddity: a place for state that one does not think of, with what becomes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hpstage.torch

Touch = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Oddity:
    """``make`` makes what is kept as ``self.kept``, in ``__init__`` and in ``model()``; ``touch`` changes it in each
    step and gives a number that shows it; ``refused``: what the error says."""

    make: Callable[[], Any]
    touch: Touch
    refused: str | None = None
    network: Callable[[], nn.Module] | None = None


ODDITIES: dict[str, Oddity] = {}


def odd(
    name: str,
    make: Callable[[], Any] = lambda: None,
    *,
    refused: str | None = None,
    network: Callable[[], nn.Module] | None = None,
) -> Callable[[Touch], Touch]:
    def note(touch: Touch) -> Touch:
        ODDITIES[name] = Oddity(make, touch, refused, network)
        return touch

    return note


class Odd(hpstage.torch.TorchTrainable):
    device = "cpu"
    batch_size = 4
    data_version = "1"

    def __init__(self, oddity: Oddity, place: str) -> None:
        self.oddity, self.place = oddity, place
        self.steps = 0
        if place == "__init__":
            self.kept = oddity.make()

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        make = self.oddity.network or (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 3)))
        self.net: Any = make()
        if self.place == "model":
            self.kept = self.oddity.make()
        return self.net

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def dataset(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(12, 1, 4, 4, generator=generator), torch.arange(12) % 3)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        self.steps += 1
        optimizer.zero_grad()
        touched = float(self.oddity.touch(self.kept, self))
        (self.loss(model, batch) * (1 + 0.01 * touched)).backward()
        optimizer.step()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": float(self.loss(model, self.dataset().tensors))}
