"""What training makes with the means of Python, torch and NumPy: captured exactly, or refused by name."""

from __future__ import annotations

import datetime
import decimal
import fractions
import functools
import math
import os.path
import pathlib
import random
import threading
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn
from torch.optim.swa_utils import SWALR

from tests.torch.oddities.containers import Item
from tests.torch.oddities.oddity import Odd, odd

# --- values


@odd("values of Python's that training makes")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        zone = datetime.timezone(datetime.timedelta(hours=1), "here")
        day = datetime.datetime(2026, 3, 29, 1, 30, 5, 7, zone, fold=1)
        self.values = (
            (pathlib.Path("best") / "größer.pt", pathlib.PurePosixPath("/a")),
            (fractions.Fraction(-1, 3), decimal.Decimal("1.50"), decimal.Decimal("-0"), decimal.Decimal("NaN")),
            (day, day.date(), day.timetz(), day - day.replace(year=2020), datetime.UTC),
            uuid.UUID(int=7),
        )
    if self.steps < 2:
        return 0
    paths, numbers, times, identifier = self.values
    assert str(paths[0]) == "best/größer.pt"
    assert paths[0].is_absolute() is False
    assert str(numbers[1]) == "1.50"
    assert times[0].tzname() == "here"
    assert times[0].fold == 1
    assert identifier.int == 7
    return float(numbers[0]) + math.copysign(1, numbers[2]) + times[3].days % 7


@odd("a thread local that training makes")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.of_thread = threading.local()
        self.of_thread.seen = []
        self.of_thread.itself = self.of_thread
    if self.steps < 2:
        return 0
    assert self.of_thread.itself is self.of_thread
    self.of_thread.seen.append(self.steps)
    return float(sum(self.of_thread.seen))


# --- functions


@odd("a function of torch's that training chooses")
def _(kept: Any, self: Odd) -> float:
    self.chosen = F.l1_loss if self.steps < 2 else F.mse_loss
    self.others = [torch.tanh if self.steps < 4 else torch.relu, F.max_pool2d, F.gelu, math.sqrt, np.log1p]
    return float(self.chosen(self.others[0](torch.full((3,), -0.5)), torch.zeros(3)))


@odd("a function of the system's that training chooses", refused=r"self\.chosen holds a function that training has")
def _(kept: Any, self: Odd) -> float:
    self.chosen = os.path.expanduser
    return 0


@odd("a partial of a function of torch's that training makes")
def _(kept: Any, self: Odd) -> float:
    if self.steps in (1, 3):
        self.chosen = functools.partial(F.smooth_l1_loss, beta=0.1 * self.steps)
        self.nested = functools.partial(self.chosen, torch.ones(2))
    return float(self.nested(torch.zeros(2)))


def scaled(items: list[float], value: float, by: float = 1) -> float:
    items.append(value)
    return len(items) * value * by


@odd("a partial of the user's function that training makes")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.chosen = functools.partial(scaled, [], by=2)
    return self.chosen(0.1) if self.steps >= 2 else 0


@odd("a partial of what could do anything", refused=r"self\.chosen holds a .*partial that training has made")
def _(kept: Any, self: Odd) -> float:
    self.chosen = functools.partial(expanded, "~")
    return 0


expanded = os.path.expanduser

# --- random numbers


@odd("generators of NumPy's that training makes")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.noise = np.random.default_rng(self.steps)
        self.others = [np.random.Generator(kind([1, 2])) for kind in (np.random.MT19937, np.random.Philox)]
        self.same = np.random.Generator(self.noise.bit_generator)
    if self.steps < 2:
        return 0
    child = self.noise.spawn(1)[0]
    return self.noise.random() + self.same.random() + child.random() + sum(other.random() for other in self.others)


@odd("a generator of NumPy's on the numbers of another", lambda: np.random.default_rng(3))
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.same = np.random.Generator(kept.bit_generator)
    return kept.random() + (self.same.random() if self.steps >= 2 else 0)


@odd("generators of Python's that training makes")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.noise, self.old = random.Random(3), np.random.RandomState(4)
    return self.noise.random() + float(self.old.rand()) if self.steps >= 2 else 0


@odd("functions that draw from the generators of the process")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.draws = [random.random, random.gauss, torch.default_generator.initial_seed]
    return sum(draw() for draw in self.draws) % 1000 if self.steps >= 2 else 0


@odd("the generators of the process")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.noise, self.old = torch.default_generator, np.random.mtrand._rand
    return float(torch.rand(1, generator=self.noise)) + float(self.old.rand()) if self.steps >= 2 else 0


@odd(
    "what the generator of the process is made of", refused=r"self\.noise holds the random generator \S+_bit_generator"
)
def _(kept: Any, self: Odd) -> float:
    self.noise: Any = np.random.mtrand._rand._bit_generator
    return 0


# --- schedulers of torch's


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


@odd("an SWALR that training makes", optimizer)
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.scheduler = SWALR(kept, swa_lr=0.5, anneal_epochs=3)
    kept.step()
    if self.steps >= 2:
        self.scheduler.step()
    return kept.param_groups[0]["lr"]


@odd("schedulers that training makes, one after the other")
def _(kept: Any, self: Odd) -> float:
    schedulers = torch.optim.lr_scheduler
    if self.steps == 2:
        self.second = optimizer()
        first, second = schedulers.LinearLR(self.second, 0.1, 1, 2), schedulers.CosineAnnealingLR(self.second, 9)
        self.scheduler: Any = schedulers.SequentialLR(self.second, [first, second], [2])
    if self.steps < 2:
        return 0
    if self.steps == 5:
        self.scheduler = schedulers.ReduceLROnPlateau(self.second, patience=0)
    self.second.step()
    self.scheduler.step(*([1.0] if self.steps >= 5 else []))
    return self.second.param_groups[0]["lr"]


# --- hooks


@odd("a hook for the length of a step")
def _(kept: Any, self: Odd) -> float:
    seen: list[float] = []
    hook = self.net[1].register_forward_hook(lambda module, inputs, output: seen.append(float(output.sum())))
    self.net(torch.ones(1, 1, 4, 4))
    hook.remove()
    return seen[0]


# --- weights that torch computes from others before they are used


def normed() -> nn.Module:
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 3))
    nn.utils.weight_norm(network[1])
    nn.utils.spectral_norm(network[2])
    return network


def pruned() -> nn.Module:
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 3))
    nn.utils.prune.l1_unstructured(network[1], "weight", amount=0.3)
    return network


for make in (normed, pruned):
    odd(f"a network that is {make.__name__}", network=make)(lambda kept, self: float(self.net[1].weight.sum()))


@odd("a network that is pruned in training, twice")
def _(kept: Any, self: Odd) -> float:
    if self.steps in (2, 4):
        nn.utils.prune.l1_unstructured(self.net[1], "weight", amount=0.3)
        nn.utils.prune.random_unstructured(self.net[2], "weight", amount=2)
    return float((self.net[1].weight == 0).sum())


@odd("a network that is normed in training")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        nn.utils.weight_norm(self.net[1])
        nn.utils.spectral_norm(self.net[2])
    return float(self.net[1].weight.sum())


@odd("a recurrent layer that is normed", network=lambda: Recurrent())
def _(kept: Any, self: Odd) -> float:
    return float(self.net.inner.weight_hh_l0.sum())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = nn.utils.weight_norm(nn.LSTM(4, 3, batch_first=True), "weight_hh_l0")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x.squeeze(1))[0][:, -1]
        return result


@odd("a weight of one's own", network=lambda: Scaled(lambda weight: weight * 2))
def _(kept: Any, self: Odd) -> float:
    return 0


@odd(
    "a weight of one's own, through which gradients may still be requested",
    refused=r"model\.scaled is a tensor that is part of a graph",
    network=lambda: Scaled(lambda weight: weight + 2),
)
def _(kept: Any, self: Odd) -> float:
    return 0


class Scaled(nn.Module):
    def __init__(self, scale: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(16, 3), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scaled = self.scale(self.inner.weight)
        return F.linear(x.flatten(1), self.scaled)


@odd("a linked list that grows", dict, refused=r"self\.kept.*last.* leads to more than 30 objects that training has")
def _(kept: Any, self: Odd) -> float:
    for _ in range(400):
        item: Any = Item()
        item.before = kept.get("last")
        kept["last"] = item
    return 0


@odd("what a layer keeps of its last batch", network=lambda: Remembering())
def _(kept: Any, self: Odd) -> float:
    shown = 0.0 if self.net.hidden is None else float(self.net.hidden.detach().sum() + self.net.maps[0][1, 0])
    if self.steps == 2:
        self.net.hidden.detach_()
    return shown


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 4), nn.Linear(4, 3)
        self.hidden: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = torch.tanh(self.inner(x.flatten(1)))
        self.maps = [F.softmax(self.hidden, 1).T, 2 * self.hidden]
        result: torch.Tensor = self.outer(self.maps[0].T + self.maps[1])
        return result


@odd("an object that training makes, as a key and in its value", dict)
def _(kept: Any, self: Odd) -> float:
    node = Item()
    kept[node] = node
    kept[node, self.steps] = [node]
    return sum(key is value or (type(key) is tuple and key[0] is value[0]) for key, value in kept.items())
