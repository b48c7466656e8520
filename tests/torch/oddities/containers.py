"""Containers that hold what changes, notice being read or refuse to be changed."""

from __future__ import annotations

import collections
import itertools
import queue
import types
from typing import Any

import numpy as np

from tests.torch.oddities.oddity import Odd, odd


class Item:
    def __init__(self) -> None:
        self.n = 0


@odd("an object in a set", lambda: {Item()})
def _(kept: Any, self: Odd) -> float:
    (item,) = kept
    item.n += 1
    return item.n


@odd("an object in a frozenset", lambda: frozenset([(1, Item())]))
def _(kept: Any, self: Odd) -> float:
    ((_, item),) = kept
    item.n += 1
    return item.n


@odd("one of several objects in a set", lambda: {Item(), Item()}, refused=r"self\.kept\{Item\?\}'? is one of several")
def _(kept: Any, self: Odd) -> float:
    item = min(kept, key=id)
    item.n += 1
    return item.n


@odd("a set that has been larger", lambda: set(range(60)), refused=r"self\.kept is a set whose order")
def _(kept: Any, self: Odd) -> float:
    kept.difference_update([n for n in kept if n not in (3, 35, 50)])
    kept.update([35 + 64 * self.steps])
    return sum(n * i for i, n in enumerate(kept)) / 1000


@odd("a set of numbers that gives them one by one", lambda: set(range(40)), refused=r"self\.kept is a set whose order")
def _(kept: Any, self: Odd) -> float:
    number = kept.pop()
    kept.add(number)
    return number


@odd("a set that is emptied, and has given members", set, refused=r"self\.kept is a set whose order")
def _(kept: Any, self: Odd) -> float:
    kept.update(range(self.steps + 2))
    number = kept.pop()
    kept.clear()
    return number


@odd("a set of cells of a grid", lambda: {(0, 0)}, refused=r"self\.kept is a set whose order")
def _(kept: Any, self: Odd) -> float:
    kept.add((9 - self.steps, self.steps))
    return sum(i * (x + 11 * y) for i, (x, y) in enumerate(kept)) / 1000


@odd("a set of NumPy's numbers", lambda: {np.int64(3)})
def _(kept: Any, self: Odd) -> float:
    kept.add(np.int64(32 * (9 - self.steps)))
    return sum(i * int(n) for i, n in enumerate(kept)) / 1000


@odd("a view of a dict", lambda: types.MappingProxyType({"a": [0]}))
def _(kept: Any, self: Odd) -> float:
    kept["a"].append(1)
    return len(kept["a"])


@odd("a list of many lists", lambda: [[0] for _ in range(1500)])
def _(kept: Any, self: Odd) -> float:
    kept[17][0] += 1
    return kept[17][0]


@odd("a dict of many lists", lambda: {n: [] for n in range(1500)})
def _(kept: Any, self: Odd) -> float:
    kept[17].append(1)
    return len(kept[17])


@odd(
    "a list of more dicts than can be followed", lambda: [{"n": n} for n in range(70_000)], refused=r"65,536 containers"
)
def _(kept: Any, self: Odd) -> float:
    kept[17]["n"] += 1
    return kept[17]["n"]


@odd("a list of many tuples that hold lists", lambda: [(n, [0]) for n in range(1500)])
def _(kept: Any, self: Odd) -> float:
    kept[17][1].append(1)
    return len(kept[17][1])


class Watched(dict[str, int]):
    """It notices being read, and cannot be cleared."""

    def __init__(self) -> None:
        super().__init__(a=1)
        self.reads = 0

    def __getitem__(self, key: str) -> int:
        self.reads += 1
        return super().__getitem__(key)

    def __iter__(self) -> Any:
        self.reads += 1
        return super().__iter__()

    def keys(self) -> Any:
        self.reads += 1
        return super().keys()

    def items(self) -> Any:
        self.reads += 1
        return super().items()

    def clear(self) -> None:
        raise RuntimeError("never")


@odd("a dict that notices being read", Watched)
def _(kept: Any, self: Odd) -> float:
    return kept["a"] + kept.reads


class Output(collections.OrderedDict[str, int]):
    """As those of transformers, which cannot be changed as dicts are."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("never")

    def pop(self, *args: Any) -> Any:
        raise RuntimeError("never")

    def clear(self) -> None:
        raise RuntimeError("never")


@odd("an OrderedDict that refuses changes", lambda: Output(a=1, b=2))
def _(kept: Any, self: Odd) -> float:
    kept["a"] += 1
    kept.move_to_end(next(iter(kept)))
    return kept["a"] + (next(iter(kept)) == "b")


class Slotted(list[int]):
    __slots__ = ("n",)

    def __init__(self) -> None:
        super().__init__([1, 2])
        self.n = 0

    def __iter__(self) -> Any:
        self.n += 1
        return super().__iter__()


@odd("a list with slots", Slotted)
def _(kept: Any, self: Odd) -> float:
    return sum(kept) + kept.n


class Named(tuple[Any, ...]):
    n: int


@odd("a tuple with attributes", lambda: Named((1, [0])))
def _(kept: Any, self: Odd) -> float:
    kept.n = getattr(kept, "n", 0) + 1
    kept[1].append(1)
    return kept.n + len(kept[1])


class Config(dict[str, Any]):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


@odd("a dict with items for attributes", lambda: Config(n=0))
def _(kept: Any, self: Odd) -> float:
    kept.n += 1
    return kept.n


@odd("a ChainMap and a UserDict", lambda: (collections.ChainMap({}, {"a": 1}), collections.UserDict(a=1)))
def _(kept: Any, self: Odd) -> float:
    for table in kept:
        table["a"] += 1
    return kept[0]["a"] + kept[1]["a"]


@odd("a list that holds itself", list)
def _(kept: Any, self: Odd) -> float:
    kept.append(kept)
    return len(kept)


@odd("a dict of defaultdicts that training makes", dict)
def _(kept: Any, self: Odd) -> float:
    kept.setdefault("a", collections.defaultdict(list))["b"].append(1)
    return len(kept["a"]["b"])


@odd("an OrderedDict with attributes that training makes")
def _(kept: Any, self: Odd) -> float:
    best = getattr(self, "best", None)
    if best is None:
        self.best = best = self.net.state_dict()
    return "_metadata" in vars(best)


@odd("a queue", queue.Queue)
def _(kept: Any, self: Odd) -> float:
    kept.put(1)
    return kept.qsize()


# --- methods of Python's own types


def numbering() -> Any:
    numbers: Any = collections.defaultdict()
    numbers.default_factory = numbers.__len__
    return numbers


@odd("a dict that numbers its keys", numbering)
def _(kept: Any, self: Odd) -> float:
    return kept[self.steps % 4]


@odd("a dict that numbers its keys, made in training")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.numbers = numbering()
    return self.numbers[self.steps % 4] if self.steps >= 2 else 0.0


@odd("a dict of what an iterator repeats", lambda: collections.defaultdict(itertools.repeat(0).__next__))
def _(kept: Any, self: Odd) -> float:
    kept[self.steps] += 1
    return len(kept)


@odd(
    "a dict of what an iterator counts",
    lambda: collections.defaultdict(itertools.count().__next__),
    refused=r"is a itertools\.count that has moved on",
)
def _(kept: Any, self: Odd) -> float:
    return kept[self.steps]


@odd("methods of numbers that training makes", list)
def _(kept: Any, self: Odd) -> float:
    kept.append((self.steps).__add__)
    return kept[-1](len(kept))


@odd("a method of an operator of a class above", list, refused=r"self\.made holds a method-wrapper that training has")
def _(kept: Any, self: Odd) -> float:
    self.made = object.__repr__.__get__(kept)
    return len(kept)
