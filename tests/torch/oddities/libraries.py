"""Attributes, functions and classes that training changes or replaces, those of libraries above all."""

from __future__ import annotations

import functools
import importlib
import io
import random
import sys
import unittest.mock
from typing import Any

import numpy as np
import scipy.stats
import torch
from torch import nn

import tests.torch.late_in_a_module
import tests.torch.late_in_a_table  # noqa: F401  # taken out of sys.modules
from tests.torch.oddities.oddity import Odd, odd

# --- attributes of classes that derive from Python's


class CountingSet(set[int]):
    hits = 0


class CountingFrozenSet(frozenset[int]):
    hits = 0


class CountingBytes(bytearray):
    hits = 0


class CountingText(io.StringIO):
    hits = 0


class CountingRandom(random.Random):
    hits = 0


class CountingState(np.random.RandomState):
    hits = 0


class CountingGenerator(torch.Generator):
    hits = 0


def seeded(kept: Any) -> Any:
    for name in ("seed", "manual_seed"):
        if hasattr(kept, name) and not (name == "seed" and isinstance(kept, torch.Generator)):
            getattr(kept, name)(3)
    return kept


def hit(kept: Any, self: Odd) -> float:
    kept.hits += 1
    return kept.hits


for kind in (
    *(CountingSet, CountingFrozenSet, CountingBytes, CountingText),
    *(CountingRandom, CountingState, CountingGenerator),
):
    odd(f"an attribute of a {kind.__name__}", lambda kind=kind: seeded(kind()))(hit)  # type: ignore[misc]


@odd("generators that NumPy's has spawned", lambda: np.random.default_rng(3))
def _(kept: Any, self: Odd) -> float:
    return float(kept.spawn(1)[0].random())


@odd("seeds that NumPy's has spawned", lambda: np.random.SeedSequence(3))
def _(kept: Any, self: Odd) -> float:
    return float(np.random.default_rng(kept.spawn(1)[0]).random())


# --- attributes of classes, modules and functions


class WithSpecialName:
    __count__ = 0


@odd("an attribute with two underscores before and after")
def _(kept: Any, self: Odd) -> float:
    WithSpecialName.__count__ += 1
    return WithSpecialName.__count__


@odd("a module that an attribute holds", lambda: importlib.import_module("tests.torch.small_module"))
def _(kept: Any, self: Odd) -> float:
    kept.counted_there = getattr(kept, "counted_there", 0) + 1
    return kept.counted_there


@odd("an attribute of a library's class")
def _(kept: Any, self: Odd) -> float:
    nn.Linear.calls_of_mine = getattr(nn.Linear, "calls_of_mine", 0) + 1  # type: ignore[assignment,operator]
    return nn.Linear.calls_of_mine  # type: ignore[return-value]


@odd("an attribute of a library")
def _(kept: Any, self: Odd) -> float:
    torch.calls_of_mine = getattr(torch, "calls_of_mine", 0) + 1  # type: ignore[attr-defined]
    sys.calls_of_mine = getattr(sys, "calls_of_mine", 0) + 2  # type: ignore[attr-defined]
    return torch.calls_of_mine + sys.calls_of_mine  # type: ignore[attr-defined,no-any-return]


@odd("an attribute of a library's function")
def _(kept: Any, self: Odd) -> float:
    function: Any = nn.functional.cross_entropy
    function.calls_of_mine = getattr(function, "calls_of_mine", 0) + 1
    return function.calls_of_mine


# --- functions and classes of libraries that are replaced


def leaking(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, x * 0.3)


def tried(step: int) -> float:
    return float(nn.functional.softsign(torch.tensor(-float(step))) + nn.Identity()(torch.tensor(1.0)).sum())


@odd("a function of a library, replaced by name")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        setattr(nn.functional, "softsign", leaking)  # noqa: B010
    return tried(self.steps)


@odd("a function of a library, replaced by another one's under a name that is made up")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        setattr(nn.functional, "".join(("soft", "sign")), nn.functional.relu6)
    return tried(self.steps)


@odd(
    "a function of a library, replaced by one that training makes",
    refused=r"torch\.nn\.functional\.softsign holds a function that training has made",
)
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        unittest.mock.patch("torch.nn.functional.softsign", lambda x: x * 0.5).start()
    try:
        return tried(self.steps)
    finally:
        if self.steps == 6:
            unittest.mock.patch.stopall()


@odd("a function of a library, wrapped by one that counts", network=lambda: counting_calls())
def _(kept: Any, self: Odd) -> float:
    return float(nn.functional.softsign(torch.tensor(1.0)))


def counting_calls() -> nn.Module:
    calls: list[int] = []
    original = nn.functional.softsign

    @functools.wraps(original)
    def softsign(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return original(x) * len(calls)

    setattr(nn.functional, "".join(("soft", "sign")), softsign)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def halved(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


@odd("a method of a library's class, replaced under a name that is made up")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        setattr(nn.Identity, "".join(("for", "ward")), halved)
    return tried(self.steps)


# --- modules that are imported by a text


@odd("a module that is imported by its name")
def _(kept: Any, self: Odd) -> float:
    return importlib.import_module("tests.torch.late_by_name").tick() if self.steps > 1 else 0.0


@odd("a module that cannot be imported, by its name, where training does not come")
def _(kept: Any, self: Odd) -> float:
    return importlib.import_module("tests.torch.broken_on_import").tick() if self.steps < 0 else 0.0


@odd("a module that is imported by a name that is made up", lambda: "module")
def _(kept: Any, self: Odd) -> float:
    return importlib.import_module(f"tests.torch.late_in_a_{kept}").tick() if self.steps > 1 else 0.0


@odd("a module that is taken out of those there are")
def _(kept: Any, self: Odd) -> float:
    return sys.modules["tests.torch.late_in_a_table"].tick()  # type: ignore[no-any-return]


# --- what a library's module holds: objects that are no modules, functions or classes


@odd("a generator that an object of a library is given in training")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        scipy.stats.norm.random_state = np.random.default_rng(0)
    return float(scipy.stats.norm.rvs()) if self.steps > 1 else 0.0


@odd("a number on an object of a library")
def _(kept: Any, self: Odd) -> float:
    scipy.stats.expon.seen = getattr(scipy.stats.expon, "seen", 0) + 1
    return float(scipy.stats.expon.seen)
