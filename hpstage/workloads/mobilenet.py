"""MobileNetV2 on CIFAR-10, with data augmentation whose strength grows during training.

The network is that of Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks" (arXiv 1801.04381),
without the first two reductions of resolution, since images have 32 x 32 pixels. Besides cropping and flipping, a
square of each image is blanked: "Cutout" (arXiv 1708.04552). Its side is a hyperparameter that grows at some epoch.

    export CIFAR10=path/to/cifar-10-batches-bin
    hpstage run hpstage.workloads.mobilenet:MobileNetV2 hpstage.workloads.mobilenet:space \
        --metric accuracy --direction maximize --steps 120 --n-trials 48 --algorithm 'SuccessiveHalving(15, 2)'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpstage import schedule as s
from hpstage.workloads.cifar import Cifar10, augment, scale

if TYPE_CHECKING:
    import optuna

STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""For each stage: expansion, channels, number of blocks, stride of the first block (table 2 of the paper)."""


class InvertedResidual(nn.Module):
    """A block that expands by a 1 x 1 convolution, filters each channel by 3 x 3, and projects by 1 x 1 without an
    activation."""

    def __init__(self, before: int, channels: int, expansion: int, stride: int) -> None:
        super().__init__()
        inner = before * expansion
        self.layers = nn.Sequential(
            *(nn.Conv2d(before, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()),
            *(nn.Conv2d(inner, inner, 3, stride, padding=1, groups=inner, bias=False), nn.BatchNorm2d(inner)),
            *(nn.ReLU6(), nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels)),
        )
        self.adds = stride == 1 and before == channels

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return x + out if self.adds else out


def cutout(images: Tensor, side: int) -> Tensor:
    """Blank a square of ``side`` pixels around a random pixel of each image."""
    count, _, height, width = images.shape
    at = images.device
    y, x = torch.rand(2, count, 1, 1, device=at)
    down = torch.arange(height, device=at)[:, None] - (y * height).floor() + side // 2
    right = torch.arange(width, device=at) - (x * width).floor() + side // 2
    blank = (down >= 0) & (down < side) & (right >= 0) & (right < side)
    return images.masked_fill(blank[:, None], 0)


class MobileNetV2(Cifar10):
    """A MobileNetV2 on CIFAR-10. The numbers of channels are multiplied by ``width``."""

    def __init__(
        self, folder: str | None = None, *, width: float = 1.0, stages: Sequence[Sequence[int]] = STAGES
    ) -> None:
        super().__init__(folder)
        self.width, self.stages = width, stages

    def model(self, hp: Mapping[str, Any]) -> torch.nn.Module:
        before = self._wide(32)
        layers: list[nn.Module] = [nn.Conv2d(3, before, 3, padding=1, bias=False), nn.BatchNorm2d(before), nn.ReLU6()]
        for expansion, channels, blocks, stride in self.stages:
            for block in range(blocks):
                layers.append(InvertedResidual(before, self._wide(channels), expansion, 1 if block else stride))
                before = self._wide(channels)
        last = self._wide(1280)
        layers += [nn.Conv2d(before, last, 1, bias=False), nn.BatchNorm2d(last), nn.ReLU6()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(last, 10))

    def _wide(self, channels: int) -> int:
        return max(4, round(channels * self.width))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        side = self.hp["cutout"]
        assert isinstance(side, int)
        return functional.cross_entropy(model(cutout(scale(augment(images)), side)), labels)


def space(trial: optuna.Trial, epochs: int = 120) -> dict[str, s.Schedule | s.Scalar]:
    """Warm-up to one of two learning rates, then a cosine; cutout grows from 8 pixels to 12 or 16 at some epoch."""
    lr = trial.suggest_categorical("lr", [0.1, 0.05])
    side = trial.suggest_categorical("cutout", [12, 16])
    grown = epochs * trial.suggest_categorical("more_cutout_from", [50, 65, 80]) // 100
    warmup = max(1, epochs // 24)
    return {
        "lr": s.linear(lr, start_factor=0.1, total_iters=warmup)
        .until(warmup)
        .then(s.cosine(lr, T_max=epochs - warmup)),
        "momentum": 0.9,
        "weight_decay": 4e-5,
        "batch_size": 128,
        "cutout": s.piecewise({0: 8, grown: side}),
    }
