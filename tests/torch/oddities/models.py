"""Kinds of models: recurrent, tied, pruned, traced, lazy and such as change their own buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.torch.oddities.oddity import odd


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def convolution() -> Any:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


def weight_norm() -> nn.Module:
    model = convolution()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[4])
    return model


def old_spectral_norm() -> nn.Module:
    model = convolution()
    nn.utils.spectral_norm(model[0])
    return model


def pruned() -> nn.Module:
    from torch.nn.utils import prune

    model = convolution()
    prune.l1_unstructured(model[4], "weight", 0.5)
    return model


class Recurrent(nn.Module):
    """It continues from where it stood."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(4, 3, 2, batch_first=True)
        self.hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = None if self.hidden is None else self.hidden[:, :1].expand(2, len(x), 3).contiguous()
        out, hidden = self.cells(x[:, 0], hidden)
        if self.training:
            self.hidden = hidden.detach()
        return out[:, -1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.other(self.one(x.flatten(1))))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return nn.Sequential(nn.Flatten(1, 2), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(16, 3))


class Counting(nn.Module):
    """A number, a list and a buffer that come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
        self.register_buffer("seen", None)
        self.config = {"scale": [1.0]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = torch.zeros(1) if self.seen is None else self.seen + 1
            self.config["scale"].append(0.5)
            self.register_buffer("late", torch.ones(1), persistent=False)
        return self.inner(x) * (1 + 0.01 * len(self.config["scale"]))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm and spectral_norm": weight_norm,
    "a recurrent network that continues": Recurrent,
    "tied weights": Tied,
    "a transformer": transformer,
    "buffers and attributes that come and go": Counting,
    "a traced model": lambda: torch.fx.symbolic_trace(convolution()),
    "DataParallel": lambda: nn.DataParallel(convolution()),
    "in double precision": lambda: nn.Sequential(Doubled(), convolution().double()),
}
for _name, _make in MODELS.items():
    odd(_name, network=_make)(lambda kept, self: 0)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


odd(
    "weights that are made again at each step, in a graph",
    network=old_spectral_norm,
)(lambda kept, self: 0)
odd(
    "pruned weights",
    network=pruned,
)(lambda kept, self: 0)
odd(
    "lazy layers",
    network=lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(3)),
    refused=r"model\.1\.weight has no shape yet",
)(lambda kept, self: 0)
