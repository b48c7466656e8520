"""Instances, layers, criteria and optimizers that training makes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import typing
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
from torch import nn

from tests.torch.oddities.oddity import Odd, odd


class Transition(typing.NamedTuple):
    reward: float
    states: list[float]


@dataclasses.dataclass
class Entry:
    n: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    n: int = 0


@odd("named tuples that training makes", lambda: collections.deque(maxlen=3))
def _(kept: Any, self: Odd) -> float:
    kept.append(Transition(self.steps, [1.0]))
    kept[0].states.append(2.0)
    return sum(entry.reward + len(entry.states) for entry in kept)


@odd("instances that training makes", list)
def _(kept: Any, self: Odd) -> float:
    kept.append(Entry(len(kept)))
    kept[0].n += 1
    return sum(entry.n for entry in kept)


@odd("a frozen instance that is replaced", Frozen, refused=r"self\.kept holds a .*Frozen that training has made")
def _(kept: Any, self: Odd) -> float:
    self.kept = dataclasses.replace(kept, n=kept.n + 1)
    return self.kept.n


@odd("a class of a function's own", refused=r"self\.local holds .*Local that training has made")
def _(kept: Any, self: Odd) -> float:
    class Local:
        n = 1

    self.local = Local()
    return 1


@odd("a function that training makes", refused=r"self\.made holds a function that training has made")
def _(kept: Any, self: Odd) -> float:
    steps = self.steps
    self.made = lambda: steps
    return self.made()


@odd("a bound method that training keeps", Entry)
def _(kept: Any, self: Odd) -> float:
    self.bound = kept.__repr__
    kept.n += 1
    return len(self.bound())


@odd("the dict of an instance, kept by training", Entry, refused=r"self\.names is the `__dict__` of self\.kept")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.names = vars(kept)
    if self.steps > 2:
        self.names["n"] += 1
    return kept.n


class Listed(list[float]):
    n = 0


def counted() -> float:
    return float(vars(counted).get("n", 0))


for kind, make, path in (
    ("a list", Listed, r"self\.kept"),
    ("a tensor", lambda: torch.zeros(2), r"self\.kept"),
    ("a local of threads", threading.local, r"self\.kept"),
    ("a function", lambda: counted, r"\S+"),
):

    @odd(f"the dict of {kind}, kept by training", make, refused=rf"self\.names is the `__dict__` of {path}, kept by")
    def _(kept: Any, self: Odd) -> float:
        if self.steps == 2:
            self.names = vars(kept)
        if self.steps > 2:
            self.names["n"] = self.names.get("n", 0) + 1
        return float(vars(kept).get("n", 0))


class Shared:
    names: ClassVar[dict[str, Any]] = {"n": 0}

    def __init__(self) -> None:
        self.__dict__ = Shared.names


@odd("instances that share a dict", lambda: [Shared(), Shared()])
def _(kept: Any, self: Odd) -> float:
    kept[0].n += 1
    return float(kept[1].n)


@odd("an instance that training gives a dict", refused=r"`__dict__` of self\.made, an .* is Shared\.names, too")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.made = Shared()
    if self.steps > 2:
        self.made.n += 1
    return float(Shared.names["n"])


@odd("an instance that training gives another's dict", refused=r"`__dict__` of self\.\w+, .* is that of self\.\w+, too")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.first, self.second = Entry(), Entry()
        self.first.__dict__ = self.second.__dict__
    if self.steps > 2:
        self.first.n += 1
        return self.second.n
    return 0


@odd("the dict of an instance, kept from the beginning", lambda: [entry := Entry(), vars(entry)])
def _(kept: Any, self: Odd) -> float:
    kept[1]["n"] += 1
    return kept[0].n


class Members(set[float]):
    n = 0


_ATTACHED = r"training has attached another `__dict__` to "
for kind, make, path in (
    ("an instance", Entry, r"self\.kept\[0\]"),
    ("a list", Listed, r"self\.kept\[0\]"),
    ("a set", Members, r"self\.kept\[0\]"),
    ("a tensor", lambda: torch.zeros(2), r"self\.kept\[0\]"),
    ("a function", lambda: counted, r"\S+"),
):

    @odd(
        f"{kind} that is given a dict of before",
        lambda make=make: [make(), {"n": 5}],  # type: ignore[misc]
        refused=rf"{_ATTACHED}{path}, which is self\.kept\[1\], too",
    )
    def _(kept: Any, self: Odd) -> float:
        if self.steps == 2:
            kept[0].__dict__ = kept[1]
        kept[1]["n"] += 1
        return float(vars(kept[0]).get("n", 0))


@odd(
    "an instance that is given another's dict, both of before",
    lambda: [Entry(), Entry()],
    refused=rf"{_ATTACHED}self\.kept\[0\], which is that of self\.kept\[1\], too",
)
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        kept[0].__dict__ = vars(kept[1])
    kept[1].n += 1
    return kept[0].n


@odd(
    "an instance that no longer shares its dict",
    lambda: [Shared(), Shared()],
    refused=rf"{_ATTACHED}self\.kept\[0\], while the one before is that of self\.kept\[1\], too",
)
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        kept[0].__dict__ = dict(vars(kept[0]))
    kept[1].n += 1
    return kept[0].n


@odd(
    "an instance that is given a dict of another kind",
    Entry,
    refused=rf"{_ATTACHED}self\.kept, a OrderedDict",
)
def _(kept: Any, self: Odd) -> float:
    kept.__dict__ = collections.OrderedDict(n=kept.n + 1)
    return kept.n


@odd(
    "a set that is given a new dict",
    Members,
    refused=rf"{_ATTACHED}self\.kept, whose entries it shows",
)
def _(kept: Any, self: Odd) -> float:
    kept.__dict__ = {"n": kept.n + 1}
    return kept.n


for kind, make in (("an instance", Entry), ("a list", Listed), ("a tensor", lambda: torch.zeros(2))):

    @odd(f"{kind} that is given a new dict in each step", make)
    def _(kept: Any, self: Odd) -> float:
        kept.__dict__ = {"n": vars(kept).get("n", 0) + 1}
        return float(kept.n)


class Named(np.float64):
    n = 0


@odd("an attribute of a number of NumPy's", lambda: Named(1))
def _(kept: Any, self: Odd) -> float:
    kept.n += 1
    return kept.n


@functools.singledispatch
def weight_of(item: object) -> float:
    return 1


def weight_of_entry(item: Entry) -> float:
    return 2


@odd("a function for a class, registered with another", Entry)
def _(kept: Any, self: Odd) -> float:
    was = weight_of(kept)
    if self.steps == 2:
        weight_of.register(Entry, weight_of_entry)
    return was


@odd("a layer that is replaced")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.net[1] = nn.Sequential(nn.Linear(16, 4), nn.Dropout(0.5))
    return 0


@odd("a criterion that is made when it is needed")
def _(kept: Any, self: Odd) -> float:
    if not hasattr(self, "criterion"):
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.calls = 0
    self.calls += 1
    return self.calls


@odd("an optimizer that is made when it is needed")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.second = torch.optim.Adam(self.net.parameters(), lr=0.01)
    if self.steps > 2:
        self.net[1].weight.grad = torch.ones_like(self.net[1].weight)
        self.second.step()
    return 0


@odd("a generator of random numbers that training makes")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.noise = torch.Generator().manual_seed(7)
    return float(torch.rand((), generator=self.noise)) if self.steps >= 2 else 0


class Struct(msgspec.Struct):
    n: int = 0


@odd("a struct of msgspec", Struct)
def _(kept: Any, self: Odd) -> float:
    kept.n += 1
    return kept.n


@odd("a struct of msgspec that training makes", Struct, refused=r"self\.made holds a .*Struct that training has made")
def _(kept: Any, self: Odd) -> float:
    self.made = Struct(self.steps)
    return self.made.n
