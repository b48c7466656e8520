"""A small CNN on scikit-learn's digits, and the grid of 48 trials that benchmarks train of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hpstage

GRID: dict[str, list[Any]] = {
    "lr": [0.1, 0.05, 0.02],
    "drop": [0.3, 0.5, 0.6, 0.8],
    "gamma": [0.1, 0.3],
    "late": [0, 1],
}


class SmallCnn(hpstage.torch.TorchTrainable):
    """8 and 16 channels; a step is a batch."""

    device = "cpu"

    def __init__(self, numerics: str, stacked: int) -> None:
        self.numerics, self.max_stacked = numerics, stacked

    def dataset(self) -> TensorDataset:
        from sklearn.datasets import load_digits  # here, since the search's own process needs no data

        images, labels = load_digits(return_X_y=True)
        x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
        self.test = x[1437:], y[1437:]
        return TensorDataset(x[:1437], y[:1437])

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)),
        )

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"], momentum=hp["momentum"])

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        x, y = self.test
        return {"accuracy": (model(x).argmax(1) == y).double().mean().item()}
