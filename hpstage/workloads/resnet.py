"""ResNet-20 and ResNet-56 on CIFAR-10, with schedules of learning rates: the example of the papers on stage trees.

The network is that of He et al., "Deep Residual Learning for Image Recognition" (arXiv 1512.03385, section 4.2): three
groups of basic blocks with 16, 32 and 64 channels, with shortcuts that have no parameters. The space resembles those of
"Stage-based Hyperparameter Optimization" (arXiv 1911.10504) and "Hippo" (arXiv 2006.11972): learning rates that drop at
some epochs, decay exponentially, or restart along a cosine; warm-up; batches that grow. Many trials begin the same.

    export CIFAR10=path/to/cifar-10-batches-bin
    hpstage run hpstage.workloads.resnet:ResNet hpstage.workloads.resnet:space \
        --metric accuracy --direction maximize --steps 160 --n-trials 48 --algorithm 'SuccessiveHalving(20, 2)'

ResNet-56 is ``ResNet(depth=56)``.
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
    """Two 3 x 3 convolutions and a shortcut. If channels are added, they are 0 in the shortcut."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.stride, self.added = stride, channels - before

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        shortcut = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        return functional.relu(out + shortcut)


def resnet(depth: int, width: int = 16, classes: int = 10) -> nn.Module:
    """Return a ResNet of 6n + 2 layers, with ``width`` channels in its first group."""
    if depth % 6 != 2 or depth < 8:
        raise ValueError(f"depth is {depth}; it must be 6n + 2: 20, 32, 44, 56, 110")
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for group in range(3):
        channels = width << group
        for block in range(depth // 6):
            layers.append(Block(before, channels, stride=2 if group and not block else 1))
            before = channels
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
    return model


class ResNet(Cifar10):
    """A ResNet of ``depth`` layers on CIFAR-10."""

    def __init__(self, folder: str | None = None, *, depth: int = 20, width: int = 16) -> None:
        super().__init__(folder)
        self.depth, self.width = depth, width

    def model(self, hp: Mapping[str, Any]) -> torch.nn.Module:
        return resnet(self.depth, self.width)


def space(trial: optuna.Trial, epochs: int = 160) -> dict[str, s.Schedule | s.Scalar]:
    """Learning rates of three families, with equal first epochs for equal initial rates; batches may double."""
    lr = trial.suggest_categorical("lr", [0.1, 0.05])
    family = trial.suggest_categorical("family", ["multistep", "exponential", "restarts"])
    if family == "multistep":
        first = epochs * trial.suggest_categorical("first_drop", [40, 50, 60]) // 100
        second = epochs * trial.suggest_categorical("second_drop", [75, 85]) // 100
        rates = s.multistep(lr, milestones=[first, second], gamma=0.1)
    elif family == "exponential":
        begin = epochs * trial.suggest_categorical("decay_from", [25, 50]) // 100
        rates = s.constant(lr).until(begin).then(s.exponential(lr, gamma=0.01 ** (1 / (epochs - begin))))
    else:
        rates = s.cosine_restarts(lr, T_0=max(1, epochs // 8), T_mult=2)
    if trial.suggest_categorical("warmup", [False, True]):
        warmup = max(1, epochs // 32)
        rates = s.linear(lr, start_factor=0.1, total_iters=warmup).until(warmup).then(rates.since(warmup))
    doubled = epochs * trial.suggest_categorical("double_batch_at", [45, 70, 100]) // 100
    return {
        "lr": rates,
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "batch_size": s.piecewise({0: 128, doubled: 256}),
    }
