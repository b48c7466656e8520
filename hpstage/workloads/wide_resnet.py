"""WideResNet-16-4 on CIFAR-10: dropout that begins late, momentum that changes, and drops of the learning rate.

The network is that of Zagoruyko and Komodakis, "Wide Residual Networks" (arXiv 1605.07146): blocks with normalisation
and ReLU before each convolution, dropout between the two convolutions, 16 layers and 4 times the channels of a ResNet.
It shows how to apply a scheduled hyperparameter of the model: ``loss`` sets it before each batch.

    export CIFAR10=path/to/cifar-10-batches-bin
    hpstage run hpstage.workloads.wide_resnet:WideResNet hpstage.workloads.wide_resnet:space \
        --metric accuracy --direction maximize --steps 200 --n-trials 48 --algorithm 'ASHA(25, 2)'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpstage import schedule as s
from hpstage.workloads.cifar import Cifar10

if TYPE_CHECKING:
    import optuna


class Block(nn.Module):
    """BN-ReLU-conv, dropout, BN-ReLU-conv, and a shortcut: a 1 x 1 convolution if the numbers of channels differ."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(before)
        self.conv1 = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
        self.dropout = nn.Dropout(0.0)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(before, channels, 1, stride, bias=False) if before != channels else None

    def forward(self, x: Tensor) -> Tensor:
        active = functional.relu(self.norm1(x))
        out: Tensor = self.conv2(functional.relu(self.norm2(self.dropout(self.conv1(active)))))
        return out + (x if self.shortcut is None else self.shortcut(active))


def wide_resnet(depth: int, width: int, base: int = 16, classes: int = 10) -> nn.Module:
    """Return a WideResNet of 6n + 4 layers. Its groups have 1, 2 and 4 times ``width * base`` channels."""
    if depth % 6 != 4 or depth < 10:
        raise ValueError(f"depth is {depth}; it must be 6n + 4: 10, 16, 22, 28, 40")
    layers: list[nn.Module] = [nn.Conv2d(3, base, 3, padding=1, bias=False)]
    before = base
    for group in range(3):
        channels = width * base << group
        for block in range(depth // 6):
            layers.append(Block(before, channels, stride=2 if group and not block else 1))
            before = channels
    layers += [nn.BatchNorm2d(before), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)]
    return nn.Sequential(*layers)


class WideResNet(Cifar10):
    """A WideResNet of ``depth`` layers and ``width`` times the channels, on CIFAR-10."""

    nesterov = True

    def __init__(self, folder: str | None = None, *, depth: int = 16, width: int = 4, base: int = 16) -> None:
        super().__init__(folder)
        self.depth, self.width, self.base = depth, width, base

    def model(self, hp: Mapping[str, Any]) -> torch.nn.Module:
        return wide_resnet(self.depth, self.width, self.base)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = self.hp["dropout"]  # type: ignore[assignment]
        return super().loss(model, batch)


def space(trial: optuna.Trial, epochs: int = 200) -> dict[str, s.Schedule | s.Scalar]:
    """The rate drops by 5 at 30, 60 and 80 % of training, as published, or later; dropout and momentum change, too."""
    lr = trial.suggest_categorical("lr", [0.1, 0.03])
    later = trial.suggest_categorical("drop_later_by", [0, 10])
    drops = [epochs * (percent + later) // 100 for percent in (30, 60, 80)]
    dropout = trial.suggest_categorical("dropout", [0.0, 0.3])
    begun = epochs * trial.suggest_categorical("dropout_from", [0, 50]) // 100
    slower = epochs * trial.suggest_categorical("less_momentum_from", [65, 100]) // 100
    return {
        "lr": s.multistep(lr, milestones=drops, gamma=0.2),
        "momentum": s.piecewise({0: 0.9, slower: 0.8}),
        "weight_decay": 5e-4,
        "batch_size": 128,
        "dropout": s.piecewise({0: 0.0, begun: dropout}) if begun else dropout,
    }
