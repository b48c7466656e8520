"""Weak references, and objects that do not like to be looked at."""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

import torch
from torch import nn

from tests.torch.oddities.containers import Item
from tests.torch.oddities.oddity import Odd, odd

# --- weak references


class WeakTable:
    def __init__(self) -> None:
        self.one, self.other = Item(), Item()
        self.by_key: Any = weakref.WeakKeyDictionary({self.one: 0})
        self.by_value: Any = weakref.WeakValueDictionary({"a": self.one})
        self.members: Any = weakref.WeakSet([self.one])


@odd("weak dictionaries and sets", WeakTable)
def _(kept: Any, self: Odd) -> float:
    kept.by_key[kept.one] += 1
    if self.steps == 2:
        kept.by_value["a"] = kept.other
        kept.members.add(kept.other)
    return kept.by_key[kept.one] + (kept.by_value["a"] is kept.other) + len(kept.members)


@odd("a weak reference that training makes")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.layer = weakref.ref(self.net[1])
    return self.steps >= 2 and self.layer() is self.net[1]


class Forgetful:
    def __init__(self) -> None:
        self.recent: list[Item] = []
        self.known: Any = weakref.WeakValueDictionary()


@odd(
    "what only a weak dictionary refers to",
    Forgetful,
    refused=r"\.known\[0\] is referred to weakly, and held by nothing",
)
def _(kept: Any, self: Odd) -> float:
    """The first list belongs to what training begins with, so that it is not forgotten here."""
    if self.steps == 2:
        kept.recent = []
    kept.recent.append(Item())
    kept.known[self.steps] = kept.recent[-1]
    return len(kept.known)


@odd(
    "a weak reference to what is held by nothing",
    Forgetful,
    refused=r"\.only is referred to weakly, and held by nothing",
)
def _(kept: Any, self: Odd) -> float:
    if self.steps == 1:
        kept.recent.append(Item())
        kept.only = weakref.ref(kept.recent[0])
    if self.steps == 2:
        kept.recent = []
    return kept.only() is not None


# --- objects that do not like to be looked at


class NeverEqual:
    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.n = 0

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("never")


@odd("objects that cannot be compared", lambda: [NeverEqual(), NeverEqual()])
def _(kept: Any, self: Odd) -> float:
    kept[0].n += 1
    kept.reverse()
    return kept[0].n + 2 * kept[1].n


class NoAttributes:
    def __init__(self) -> None:
        object.__setattr__(self, "n", 0)

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("never")


@odd("an object whose attributes cannot be looked up", NoAttributes)
def _(kept: Any, self: Odd) -> float:
    own = object.__getattribute__(kept, "__dict__")
    own["n"] += 1
    return own["n"]


class NoClass:
    def __init__(self) -> None:
        self.n = 0

    @property
    def __class__(self) -> Any:
        raise RuntimeError("never")

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise RuntimeError("never")


@odd("an object whose class cannot be looked up", NoClass)
def _(kept: Any, self: Odd) -> float:
    kept.n += 1
    return kept.n


class Eager:
    """Looking at it changes it."""

    def __init__(self) -> None:
        self._n = 0

    @property
    def n(self) -> int:
        self._n += 1
        return self._n

    def __getattr__(self, name: str) -> None:
        self._n += 100


@odd("properties with side effects", Eager)
def _(kept: Any, self: Odd) -> float:
    return kept.n


class AskedModule(nn.Module):
    __slots__ = ("n",)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.looked_up: list[str] = []
        object.__setattr__(self, "n", 0)

    def __getattr__(self, name: str) -> Any:
        if "looked_up" in self.__dict__:
            self.looked_up.append(name)
        return super().__getattr__(name)


@odd("a module with slots that records lookups", AskedModule)
def _(kept: Any, self: Odd) -> float:
    object.__setattr__(kept, "n", kept.n + 1)
    assert kept.inner is not None
    return kept.n + len(kept.looked_up)


class Counted:
    """A descriptor that keeps what it describes."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.value = 0

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else self.value

    def __set__(self, instance: object, value: int) -> None:
        self.value = value


class WithDescriptor:
    n = Counted()


@odd("a descriptor that keeps what it describes", WithDescriptor)
def _(kept: Any, self: Odd) -> float:
    kept.n += 1
    return kept.n


class Metric:
    """As those of torchmetrics: methods are wrapped in ``__init__``."""

    def __init__(self) -> None:
        self.total = torch.zeros(1)
        self.update = self._wrapped(self.update)  # type: ignore[method-assign]
        self.cached: float | None = None
        self.calls = 0

    def _wrapped(self, update: Any) -> Any:
        @functools.wraps(update)
        def wrapped(*args: Any) -> Any:
            self.cached = None
            self.calls += 1
            return update(*args)

        return wrapped

    def update(self, value: float) -> None:
        self.total = self.total + value

    def compute(self) -> float:
        self.cached = float(self.total)
        return self.cached + self.calls


@odd("a metric with wrapped methods", Metric)
def _(kept: Any, self: Odd) -> float:
    kept.update(1.0)
    return kept.compute()


class Ticking:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, owner: Any) -> float:
        self.calls += 1
        return self.calls


def ticked(owner: list[int]) -> float:
    owner.append(1)
    return len(owner)


@odd("a bound method of an object that can be called", lambda: types.MethodType(Ticking(), []))
def _(kept: Any, self: Odd) -> float:
    return kept()


@odd("a bound method of a partial, in a list", lambda: [types.MethodType(functools.partial(ticked), [])])
def _(kept: Any, self: Odd) -> float:
    self.called = kept[0].__self__
    return kept[0]()


@odd(
    "a bound method of a partial that training makes", list, refused=r"self\.made holds a method that training has made"
)
def _(kept: Any, self: Odd) -> float:
    self.made = types.MethodType(functools.partial(ticked), kept)
    return self.made()
