"""Places for state in objects of Python's own and of libraries: captured exactly, or refused by name."""

from __future__ import annotations

import asyncio
import collections
import csv
import decimal
import functools
import hashlib
import importlib
import io
import itertools
import multiprocessing
import os
import queue
import random
import re
import sqlite3
import sys
import tempfile
import threading
import unittest.mock
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import tests.torch.late_in_a_module
import tests.torch.late_in_a_table  # noqa: F401  # taken out of sys.modules
from tests.torch.oddities import Odd, odd

NOT_SEEN = r"self\.kept is a .*, which nothing can look into"


def flagged(kept: Any, self: Odd) -> float:
    """It is set in the second step, and stays so."""
    was = kept.is_set()
    if self.steps == 2:
        kept.set()
    return was


odd("an event", threading.Event)(flagged)
odd("an event between processes", multiprocessing.Event, refused=r"self\.kept\._flag\._semlock is a .*SemLock that")(
    flagged
)
odd("an event of asyncio's", asyncio.Event)(flagged)


@odd("a semaphore", lambda: threading.Semaphore(50))
def _(kept: Any, self: Odd) -> float:
    kept.acquire()
    return kept._value


@odd("a future", Future)
def _(kept: Any, self: Odd) -> float:
    was = kept.done()
    if self.steps == 2:
        kept.set_result(1)
    return was


def filled(kept: Any) -> Any:
    for number in range(5):
        kept.put_nowait(number)
    return kept


odd("a queue of asyncio's", lambda: filled(asyncio.Queue()))(lambda kept, self: rotated(kept.get_nowait(), kept))


def rotated(value: Any, kept: Any) -> Any:
    kept.put_nowait(value)
    return value


odd("a queue written in C", lambda: filled(queue.SimpleQueue()), refused=NOT_SEEN)(
    lambda kept, self: rotated(kept.get(), kept)
)


# --- what nothing can look into


TEXT = " ".join(str(number * 7 % 13) for number in range(50))


class Squares:
    def __init__(self) -> None:
        self.power = lambda number: number * number % 7

    def __getitem__(self, index: int) -> int:
        return int(self.power(index))


def rows() -> sqlite3.Connection:
    found = sqlite3.connect(":memory:")
    found.execute("create table rows(x)")
    return found


UNSEEN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "matches of a pattern": (lambda: re.finditer(r"\d+", TEXT), lambda kept: int(next(kept)[0])),
    "a reader of rows": (lambda: csv.reader(TEXT.split()), lambda kept: int(next(kept)[0])),
    "an iterator by index": (lambda: iter(Squares()), next),
    "a digest": (hashlib.sha256, lambda kept: [kept.update(b"x"), kept.digest()[0] / 255][1]),
    "a compressor": (zlib.compressobj, lambda kept: len(kept.compress(TEXT.encode()))),
    "a place in an array": (lambda: np.arange(50.0).flat, next),
    "a database": (rows, lambda kept: kept.execute("insert into rows values (1)").lastrowid),
}
for name, (make, touch) in UNSEEN.items():
    odd(name, make, refused=NOT_SEEN)(lambda kept, self, touch=touch: touch(kept))  # type: ignore[misc]


def numbers() -> Iterator[int]:
    yield from range(1, 99)


odd("a method of a generator", lambda: numbers().__next__, refused=r"self\.kept\.__self__ is a generator that has")(
    lambda kept, self: kept()
)


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


# --- threads of the user's


class Prefetcher(threading.Thread):
    """It keeps state, whether it runs or not."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.taken, self.seen = 0, [0]


@odd("attributes of a thread of the user's", Prefetcher)
def _(kept: Any, self: Odd) -> float:
    kept.taken += 1
    kept.seen.append(self.steps)
    return kept.taken + len(kept.seen)


class Pool(ThreadPoolExecutor):
    submitted = 0


@odd("attributes of a pool of the user's", lambda: Pool(1))
def _(kept: Any, self: Odd) -> float:
    kept.submitted += 1
    return kept.submitted + float(kept.submit(lambda: 1).result())


@odd("a thread of the user's, made in training", refused=r"self\.kept holds a .*Prefetcher that training has made")
def _(kept: Any, self: Odd) -> float:
    self.kept = Prefetcher()
    return 0


# --- what cached functions keep


@functools.lru_cache(10)
def counts(name: str) -> list[int]:
    return [0]


@odd(
    "what a cached function has given, changed",
    refused=r"counts'?\.cached\[\d\], which functools\.lru_cache keeps, has",
)
def _(kept: Any, self: Odd) -> float:
    counts("steps")[0] += 1
    return counts("steps")[0]


@functools.cache
def mask(size: int) -> torch.Tensor:
    return torch.eye(size)


@odd("what a cached function has given, kept")
def _(kept: Any, self: Odd) -> float:
    self.mask = mask(3)
    return float(self.mask.sum() + mask(2).sum())


# --- settings of the process


@odd("whether numbers too small are zero")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        torch.set_flush_denormal(True)
    return float(torch.tensor(1.1754943508222875e-38) / 2 > 0)


@odd("digits of decimal numbers")
def _(kept: Any, self: Odd) -> float:
    context = decimal.getcontext()
    context.prec -= 1
    return context.prec


@odd("the working directory")
def _(kept: Any, self: Odd) -> float:
    was = os.getcwd() == tempfile.gettempdir()
    if self.steps == 2:
        os.chdir(tempfile.gettempdir())
    return was


@odd("which attention is used")
def _(kept: Any, self: Odd) -> float:
    was = torch.backends.cuda.math_sdp_enabled()
    if self.steps == 2:
        torch.backends.cuda.enable_math_sdp(False)
    return was


# --- hooks


PASSED: list[int] = []


def passed(*given: Any) -> None:
    PASSED.append(len(PASSED))


@odd("a hook of all modules, that training places")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        nn.modules.module.register_module_forward_hook(passed)
    return len(PASSED)


@odd("a full backward hook of all modules, that training places")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        nn.modules.module.register_module_full_backward_hook(passed)
    return len(PASSED)


@odd("hooks of all modules and optimizers, counting in a closure", network=lambda: with_hooks_of_all())
def _(kept: Any, self: Odd) -> float:
    return float(self.net.counted())


def with_hooks_of_all() -> Any:
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    calls: list[int] = []

    def hook(*given: Any) -> None:
        calls.append(len(calls))

    nn.modules.module.register_module_forward_hook(hook)
    register_optimizer_step_post_hook(hook)
    network.counted = lambda: len(calls)  # type: ignore[assignment]
    return network


@odd(
    "a hook of all optimizers, made in training",
    refused=r"torch\.optim\.optimizer\._global_optimizer_pre_hooks\[\d\] holds a function that training has made",
)
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        register_optimizer_step_pre_hook(lambda *given: None)
    return 0


class Packing:
    count = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return tensor

    def unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@odd("hooks of saved tensors", Packing)
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack).__enter__()
    return kept.count


@odd("a hook of a module, for the length of a step")
def _(kept: Any, self: Odd) -> float:
    seen: list[float] = []
    handle = self.net[1].register_forward_hook(lambda module, given, made: seen.append(float(made.detach().sum())))
    self.net(torch.ones(1, 4, 4))
    handle.remove()
    return seen[0]


@odd("hooks of tensors, for the length of a step", lambda: torch.ones(2, requires_grad=True))
def _(kept: Any, self: Odd) -> float:
    handles = [kept.register_hook(lambda gradient: gradient * 2)]
    handles.append(kept.register_post_accumulate_grad_hook(lambda tensor: None))
    kept.grad = None
    (kept * self.steps).sum().backward()
    for handle in handles:
        handle.remove()
    return float(kept.grad.sum())


def hooked() -> torch.Tensor:
    made = torch.ones(2, requires_grad=True)
    made.register_hook(lambda gradient: gradient * 2)
    return made


@odd("a hook of a tensor that training has made", refused=r"self\.kept has been given a hook in training")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.kept = hooked()
    return 0


# --- TorchScript


class ListOfNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = torch.jit.Attribute([], list[float])

    def forward(self, x: torch.Tensor) -> float:
        self.seen.append(1.0)
        return float(len(self.seen))


class TableOfNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = torch.jit.Attribute({"a": 0}, dict[str, int])

    def forward(self, x: torch.Tensor) -> int:
        self.seen["a"] += 1
        return self.seen["a"]


class PlainTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1.0)
        return self.seen.clone()


for module in (ListOfNumbers, TableOfNumbers, PlainTensor):
    odd(f"{module.__name__} of a scripted module", lambda module=module: torch.jit.script(module()))(  # type: ignore[misc]
        lambda kept, self: kept(torch.zeros(1))
    )


# --- iterators with a state of their own in what they call


class Counting:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, value: int) -> int:
        self.count += value
        return self.count


odd("a map that calls what counts", lambda: map(Counting(), itertools.repeat(1)))(lambda kept, self: next(kept))
odd("a partial that calls what counts", lambda: functools.partial(Counting(), 1))(lambda kept, self: kept())
odd("a list of the user's", lambda: collections.UserList([1]))(
    lambda kept, self: [kept.append(self.steps), sum(kept)][1]
)
