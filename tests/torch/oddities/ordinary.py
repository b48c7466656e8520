"""Ordinary values that never change, kept from the beginning and chosen again in each step."""

from __future__ import annotations

import cmath
import functools
import math
import operator
import re
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse
import scipy.special
import torch

from tests.torch.oddities.oddity import Odd, odd


class Point:
    x = 1.0


class Logged(dict[str, float]):
    def __setitem__(self, name: str, value: float) -> None:
        super().__setitem__(name, 2 * value)


class Path(list[float]):
    def length(self) -> float:
        return sum(self)


class Dotted(dict[str, float]):
    """Its items are its attributes."""

    def __init__(self) -> None:
        self.__dict__ = self


def everything() -> list[Any]:
    return [
        *(np.mean, np.add, np.linalg.norm, functools.reduce, torch.nn.functional, math, Point, re.match("(a)b?", "ab")),
        *(operator.itemgetter(Point, 1), operator.attrgetter("x.y"), operator.methodcaller("get", 1, default=2)),
        *(torch.finfo(torch.float16), torch.iinfo(torch.int8), np.finfo("f4"), np.iinfo("i4")),
        *(list[Point], Point | None, typing.Optional[Point], typing.Callable[[int], str], typing.List),  # noqa: UP006, UP045
        scipy.sparse.dok_matrix((2, 2)),
    ]


@odd("values that never change", everything)
def _(kept: Any, self: Odd) -> float:
    return kept[0]([self.steps, len(kept)]) + kept[1](self.steps, 1) + kept[12].max


CHOSEN: dict[str, tuple[Callable[[int], Any], Callable[[Any], float]]] = {
    "a function of NumPy's": (lambda n: (np.mean, np.max)[n], lambda kept: kept([1.0, 3.0])),
    "a function of NumPy's linear algebra": (
        lambda n: (np.linalg.norm, np.linalg.det)[n],
        lambda kept: kept(np.eye(2)),
    ),
    "a function of functools": (
        lambda n: (functools.reduce, functools.partial(np.max))[n],
        lambda kept: kept(max, [1, 2]) if kept is functools.reduce else kept([1, 3]),
    ),
    "an itemgetter": (lambda n: operator.itemgetter(n), lambda kept: kept([1, 2])),
    "an attrgetter": (lambda n: operator.attrgetter(("x", "x.real")[n]), lambda kept: kept(Point())),
    "a methodcaller": (
        lambda n: (operator.methodcaller("split", "x", maxsplit=n), operator.methodcaller("split", "x"))[n],
        lambda kept: len(kept("axbxc")),
    ),
    "a function of SciPy's": (
        lambda n: (scipy.special.expit, scipy.special.erf)[n],
        lambda kept: float(kept(0.3)),
    ),
    "a polynomial": (
        lambda n: (np.polynomial.Polynomial.fit([0, 1, 2], [n, 1, 3], 1), np.polynomial.Chebyshev([1, 2]))[n],
        lambda kept: float(kept(0.3)),
    ),
    "a polynomial of the old kind": (lambda n: np.poly1d([1, n]), lambda kept: float(kept(0.3))),
    "limits of torch's": (
        lambda n: (torch.finfo(torch.float16), torch.iinfo(torch.int8))[n],
        lambda kept: kept.max,
    ),
    "limits of NumPy's": (lambda n: (np.finfo("f2"), np.iinfo("i2"))[n], lambda kept: float(kept.max)),
    "a type with arguments": (
        lambda n: (list[int], dict[str, list[int]])[n],
        lambda kept: len(typing.get_args(kept)),
    ),
    "a union of types": (lambda n: (int | None, int | str | None)[n], lambda kept: len(typing.get_args(kept))),
    "an alias of typing's": (
        lambda n: (typing.Optional[int], typing.Callable[[int, str], None])[n],  # noqa: UP045
        lambda kept: len(typing.get_args(kept)[0] if typing.get_origin(kept) is not typing.Union else ()),
    ),
    "a module of functions": (lambda n: (math, cmath)[n], lambda kept: abs(kept.sqrt(2 + 0j if kept is cmath else 4))),
    "a module of torch's functions": (
        lambda n: (torch.nn.functional, torch.linalg)[n],
        lambda kept: float(hasattr(kept, "relu")),
    ),
    "a module that code names": (lambda n: (functools, typing)[n], lambda kept: float(hasattr(kept, "reduce"))),
}

for name, (choose, use) in CHOSEN.items():

    @odd(f"{name}, chosen in each step")
    def _(
        kept: Any,
        self: Odd,
        choose: Callable[[int], Any] = choose,
        use: Callable[[Any], float] = use,
    ) -> float:
        before = use(self.chosen) if self.steps > 1 else 0.0
        self.chosen = choose(self.steps % 2)
        self.again = [self.chosen, self.chosen]
        return before + use(self.again[1]) + (self.again[0] is self.chosen)


@odd("dicts and lists of the user's classes that training makes")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 1:
        self.log, self.path = Logged(), Path([1.0])
        self.log.whole, self.path.log = self.log, self.log
    self.log[str(self.steps)] = self.steps
    self.path.append(self.path.log.whole[str(self.steps)])
    return self.path.length()


@odd("a sparse matrix by keys that training makes")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 1:
        self.sparse = scipy.sparse.dok_matrix((3, 3))
    self.sparse[self.steps % 3, 1] += self.steps
    return float(self.sparse.sum())


@odd(
    "a dict that is its own attributes, made by training",
    refused=r"`__dict__` of self\.dotted, .* is self\.dotted, too",
)
def _(kept: Any, self: Odd) -> float:
    self.dotted = Dotted()
    self.dotted.n = self.steps
    return self.dotted["n"]


@odd("a methodcaller of Python's own", refused=r"self\.call holds a operator\.methodcaller that training has made")
def _(kept: Any, self: Odd) -> float:
    self.call = operator.methodcaller("__len__")
    return self.call([1])


@odd("a list behind a methodcaller", lambda: operator.methodcaller("count", [1.0]))
def _(kept: Any, self: Odd) -> float:
    (_, counted) = kept.__reduce__()[1]
    counted.append(float(self.steps))
    return kept([counted]) + sum(counted)


@odd("an attrgetter of Python's own", refused=r"self\.get holds a operator\.attrgetter that training has made")
def _(kept: Any, self: Odd) -> float:
    self.get = operator.attrgetter("x.__class__")
    return float(self.get(Point()) is float)


@odd("a match that training makes", refused=r"self\.match holds a re\.Match that training has made")
def _(kept: Any, self: Odd) -> float:
    self.match = re.match("a", "ab")
    return 1


@odd("limits that are given an attribute")
def _(kept: Any, self: Odd) -> float:
    self.limits = np.iinfo("i4")
    self.limits.n = self.steps  # type: ignore[attr-defined]
    return 1
