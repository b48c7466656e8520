"""State in code: globals, closures, classes, decorators, hooks."""

from __future__ import annotations

import argparse
import contextvars
import functools
import random
import threading
import typing
from typing import Any

import numpy as np
import torch
from torch import nn

import tests.torch.trainables  # noqa: F401  # as an identity does with what functions import, before anything is trained
from tests.torch import small_module
from tests.torch.oddities.oddity import Odd, odd

CACHED: list[int] = []
CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("CONTEXT", default=0)
LOCAL = threading.local()


@odd("a context variable")
def _(kept: Any, self: Odd) -> float:
    CONTEXT.set(CONTEXT.get() + 1)
    return CONTEXT.get()


VECTORIZED_CALLS = [0]


def _counted(value: float) -> float:
    VECTORIZED_CALLS[0] += 1
    return value + VECTORIZED_CALLS[0]


VECTORIZED = np.frompyfunc(_counted, 1, 1)


@odd("a function that NumPy calls for each element")
def _(kept: Any, self: Odd) -> float:
    return float(VECTORIZED(np.zeros(3)).sum())


@odd("a global variable of this thread's")
def _(kept: Any, self: Odd) -> float:
    LOCAL.n = getattr(LOCAL, "n", 0) + 1
    return LOCAL.n


DRAW = random.Random(7).random
TAKE = [*range(100)].pop
ADD = torch.zeros(()).add_


@odd("a generator behind its method")
def _(kept: Any, self: Odd) -> float:
    return DRAW()


@odd("a list behind its method")
def _(kept: Any, self: Odd) -> float:
    return TAKE() / 100


@odd("a tensor behind its method")
def _(kept: Any, self: Odd) -> float:
    return float(ADD(1))


class OfThread(threading.local):
    n = 0


@odd("an object of this thread's", OfThread)
def _(kept: Any, self: Odd) -> float:
    kept.n += 1
    return kept.n


odd("a global name by globals()")(small_module.count_by_globals)


@odd("an attribute of a module that a function imports")
def _(kept: Any, self: Odd) -> float:
    import tests.torch.trainables as elsewhere

    elsewhere.counted_here = getattr(elsewhere, "counted_here", 0) + 1  # type: ignore[attr-defined]
    return elsewhere.counted_here  # type: ignore[attr-defined,no-any-return]


def first() -> int:
    return 1


def second() -> int:
    return 5


chosen = first


@odd("a function under another name")
def _(kept: Any, self: Odd) -> float:
    global chosen
    if self.steps == 2:
        chosen = second
    return chosen()


class Patched:
    def value(self) -> int:
        return 1


@odd("a function of a class that is replaced", Patched)
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        Patched.value = lambda_of_two  # type: ignore[method-assign,assignment]
    return kept.value()


def lambda_of_two(self: Patched) -> int:
    return 2


class Plain:
    def value(self) -> int:
        return 1


class Doubled:
    def value(self) -> int:
        return 2


class Derived(Plain):
    pass


@odd("the bases of a class", Derived)
def _(kept: Any, self: Odd) -> float:
    if self.steps in (2, 5):
        Derived.__bases__ = (Doubled,) if self.steps == 2 else (Doubled, Plain)
    return kept.value() * len(Derived.__bases__)


@odd("the name of a class", Derived)
def _(kept: Any, self: Odd) -> float:
    Derived.__name__ += "d"
    Derived.__qualname__ = f"{Derived.__name__}.here"
    return len(type(kept).__qualname__)


@odd("the bases of a library's class", lambda: argparse.ArgumentError(None, ""))
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        argparse.ArgumentError.__bases__ = (BufferError,)  # which nothing but this names
    return isinstance(kept, BufferError) + 2 * isinstance(kept, ArithmeticError)


class Registry:
    made: typing.ClassVar[list[int]] = []

    @classmethod
    def add(cls) -> int:
        cls.made.append(1)
        cls.total = getattr(cls, "total", 0) + 1
        return len(cls.made) + cls.total

    @staticmethod
    def count(seen: list[int] = []) -> int:  # noqa: B006
        seen.append(1)
        return len(seen)


@odd("class methods and static methods")
def _(kept: Any, self: Odd) -> float:
    return Registry.add() + Registry.count()


class Meta(type):
    made = 0


class WithMeta(metaclass=Meta):
    pass


@odd("an attribute of a metaclass", WithMeta)
def _(kept: Any, self: Odd) -> float:
    Meta.made += 1
    return type(kept).made


def counted(function: Any) -> Any:
    calls = {"n": 0}

    @functools.wraps(function)
    def wrapper() -> int:
        calls["n"] += 1
        return calls["n"] + function()

    return wrapper


@counted
def decorated() -> int:
    return 1


@functools.singledispatch
def dispatched(value: Any) -> int:
    dispatched.n = getattr(dispatched, "n", 0) + 1  # type: ignore[attr-defined]
    return dispatched.n  # type: ignore[attr-defined,no-any-return]


class Called:
    n = 0

    def __call__(self) -> int:
        self.n += 1
        return self.n


called = Called()


@odd("functions that count")
def _(kept: Any, self: Odd) -> float:
    return decorated() + dispatched(1) + called()


def weighted(by: float = 1.0) -> float:
    return by


@odd("the default of an argument")
def _(kept: Any, self: Odd) -> float:
    weighted.__defaults__ = (weighted() * 1.1,)
    return weighted()


def keyed(*, by: float = 1.0) -> float:
    return by


@odd("the default of a keyword, by its name")
def _(kept: Any, self: Odd) -> float:
    keyed.__kwdefaults__ = {"by": keyed() * 1.1}
    return keyed()


@odd("the default of an argument that had none")
def _(kept: Any, self: Odd) -> float:
    plain.__defaults__ = ((plain.__defaults__ or (1.0,))[0] * 1.1,)
    return plain()  # type: ignore[call-arg]


def plain(by: float) -> float:
    return by


@odd("other code of a function", refused=r"swapped has been given other code in training")
def _(kept: Any, self: Odd) -> float:
    swapped.__code__ = (lambda: 2.0).__code__
    return swapped()


def swapped() -> float:
    return 1.0


@odd("a partial with a list in it", lambda: functools.partial(grown, []))
def _(kept: Any, self: Odd) -> float:
    return kept()


def grown(items: list[int]) -> int:
    items.append(1)
    return len(items)


@odd("a method of a list", lambda: [].append)
def _(kept: Any, self: Odd) -> float:
    kept(1)
    return len(kept.__self__)


@odd("hooks of modules and optimizers, counting in a closure", lambda: None, network=lambda: with_hook())
def _(kept: Any, self: Odd) -> float:
    return float(self.net.counted())


def with_hook() -> Any:
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    calls: list[int] = []

    def hook(module: Any, inputs: Any, output: Any) -> None:
        calls.append(1)

    network[1].register_forward_hook(hook)
    network.counted = lambda: len(calls)  # type: ignore[assignment]
    return network


@odd("a hook that a module is given in training")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.net[1].register_forward_hook(noted)
    return len(CACHED)


def noted(module: Any, inputs: Any, output: Any) -> None:
    CACHED.append(1)


# --- what the members of a class call, where that is not a function


class Counting(Called):
    def of(self, owner: Any) -> int:
        return self() * (owner is not None)


class Wrapped:
    partial = staticmethod(functools.partial(grown, []))
    called = staticmethod(Called())
    of_class = classmethod(Counting().of)
    value = property(Counting().of)
    growing = property(functools.partial(lambda items, owner: grown(items), []))
    within = staticmethod(staticmethod(functools.partial(grown, [])))


@odd("a partial with a list in a static method", Wrapped)
def _(kept: Any, self: Odd) -> float:
    return kept.partial() + kept.within()


@odd("an object in a static method", Wrapped)
def _(kept: Any, self: Odd) -> float:
    return kept.called()


@odd("the method of an object in a class method", Wrapped)
def _(kept: Any, self: Odd) -> float:
    return kept.of_class()


@odd("the method of an object, and a partial, in properties", Wrapped)
def _(kept: Any, self: Odd) -> float:
    return kept.value + kept.growing


class CountingProperty(property):
    lookups = 0

    def __get__(self, owner: Any, kind: Any = None) -> int:
        self.lookups += 1
        return self.lookups


class CountingMethod(staticmethod):  # type: ignore[type-arg]
    lookups = 0

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        self.lookups += 1
        return super().__get__(owner, kind)


class Counts:
    lookups = CountingProperty()
    method = CountingMethod(grown)


@odd("a property of the user's own kind", Counts)
def _(kept: Any, self: Odd) -> float:
    return kept.lookups


@odd("a static method of the user's own kind", Counts)
def _(kept: Any, self: Odd) -> float:
    return kept.method([]) + vars(Counts)["method"].lookups


hp = {"n": 0}
"""A name like any other: what a trainable is given is ``self.hp``."""


@odd("a dict in a global name that is hp")
def _(kept: Any, self: Odd) -> float:
    hp["n"] += 1
    return hp["n"]


class Named:
    hp: typing.ClassVar[list[int]] = [0]


@odd("a list of a class in an attribute that is hp")
def _(kept: Any, self: Odd) -> float:
    Named.hp.append(1)
    return len(Named.hp)


def counting_by_hp() -> Any:
    hp = {"n": 0}

    def count() -> int:
        hp["n"] += 1
        return hp["n"]

    return count


@odd("a dict that a function closes over by the name hp", counting_by_hp)
def _(kept: Any, self: Odd) -> float:
    return kept()
