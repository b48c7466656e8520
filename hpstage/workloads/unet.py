"""A U-Net that finds discs in noise, in mixed precision: bfloat16 on a CPU, float16 with a GradScaler on a GPU.

The network is that of Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation" (arXiv
1505.04597), with padded convolutions, so that masks have the size of images. The images are generated, and are the same
in every process: discs of random position, radius and brightness under noise. The mask is 1 inside a disc.

It shows how to use mixed precision: ``update`` runs the forward pass under ``torch.autocast`` and steps through the
scaler, an attribute made with the optimizer. The scale changes during training; hpstage captures it. The weights of the
two losses follow a schedule: cross-entropy at first, later more of the Dice loss (arXiv 1606.04797). On a CPU without
instructions for bfloat16, mixed precision is exact but slow.

    hpstage run hpstage.workloads.unet:UNet hpstage.workloads.unet:space \
        --metric dice --direction maximize --steps 2000 --n-trials 24 --algorithm 'SuccessiveHalving(250, 2)'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import hpstage
from hpstage import schedule as s

if TYPE_CHECKING:
    import optuna


def discs(count: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images and masks, float of shape (count, 1, size, size), with up to three discs each."""
    random = torch.Generator().manual_seed(seed)
    centre = torch.rand(count, 3, 2, 1, 1, generator=random) * size
    radius = (0.05 + 0.15 * torch.rand(count, 3, 1, 1, generator=random)) * size
    bright = 0.5 + torch.rand(count, 3, 1, 1, generator=random)
    y, x = torch.arange(size).view(size, 1), torch.arange(size)
    inside = ((y - centre[:, :, 0]) ** 2 + (x - centre[:, :, 1]) ** 2 < radius**2).float()
    noise = torch.randn(count, size, size, generator=random)
    return ((inside * bright).amax(1) + 0.7 * noise).unsqueeze(1), inside.amax(1).unsqueeze(1)


def twice(before: int, channels: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(before, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()),
        *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()),
    )


class Network(nn.Module):
    """A network that halves the resolution ``levels`` times and doubles it again, with a skip connection at each
    resolution."""

    def __init__(self, levels: int, width: int) -> None:
        super().__init__()
        wide = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(twice(before, after) for before, after in zip([1, *wide], wide, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * channels, channels, 2, 2) for channels in wide[-2::-1])
        self.merge = nn.ModuleList(twice(2 * channels, channels) for channels in wide[-2::-1])
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        across = []
        for level, down in enumerate(self.down):
            x = down(functional.max_pool2d(x, 2) if level else x)
            across.append(x)
        across.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([across.pop(), up(x)], dim=1))
        logits: Tensor = self.out(x)
        return logits


def dice(found: Tensor, mask: Tensor) -> Tensor:
    """Return the overlap of masks, from 0 to 1: twice the intersection, divided by the sum of the areas."""
    return (2 * (found * mask).sum() + 1) / (found.sum() + mask.sum() + 1)


class UNet(hpstage.torch.TorchTrainable):
    """A U-Net on generated images. A step is a batch."""

    def __init__(self, *, levels: int = 3, width: int = 16, images: int = 2000, size: int = 64) -> None:
        self.levels, self.width, self.images, self.size = levels, width, images, size

    def dataset(self) -> TensorDataset:
        self.test = discs(max(8, self.images // 10), self.size, seed=1)
        return TensorDataset(*discs(self.images, self.size, seed=0))

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return Network(self.levels, self.width)

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        self.kind = next(model.parameters()).device.type
        self.scaler = torch.amp.GradScaler(self.kind, enabled=self.kind == "cuda")
        return torch.optim.AdamW(model.parameters(), lr=hp["lr"], weight_decay=1e-2)

    def logits(self, model: nn.Module, images: Tensor) -> Tensor:
        with torch.autocast(self.kind, dtype=torch.float16 if self.kind == "cuda" else torch.bfloat16):
            found: Tensor = model(images)
        return found.float()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, masks = batch
        logits, share = self.logits(model, images), float(self.hp["dice_share"] or 0)
        entropy = functional.binary_cross_entropy_with_logits(logits, masks)
        return (1 - share) * entropy + share * (1 - dice(logits.sigmoid(), masks))

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(optimizer)
        self.scaler.update()
        return loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        images, masks = (part.to(self.kind) for part in self.test)
        found = torch.cat([self.logits(model, part) for part in torch.split(images, 50)])
        return {"dice": dice((found > 0).float(), masks).item()}


def space(trial: optuna.Trial, steps: int = 2000) -> dict[str, s.Schedule | s.Scalar]:
    """Polynomial decay of the learning rate; the Dice loss begins at one of three steps, at once or gradually."""
    lr = trial.suggest_categorical("lr", [1e-3, 3e-4])
    share = trial.suggest_categorical("dice_share", [0.5, 0.9])
    begin = steps * trial.suggest_categorical("dice_from", [40, 60, 80]) // 100
    gradually = trial.suggest_categorical("gradually", [False, True])
    rise = s.linear(share, start_factor=0.0, total_iters=max(1, steps // 10)) if gradually else s.constant(share)
    return {
        "lr": s.polynomial(lr, total_iters=steps, power=0.9),
        "dice_share": s.constant(0).until(begin).then(rise),
        "batch_size": 16,
    }
