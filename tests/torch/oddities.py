"""Places for state that one does not think of, each with what becomes of it: captured exactly, or refused by name."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import dataclasses
import enum
import functools
import io
import itertools
import logging
import multiprocessing
import queue
import sys
import tempfile
import threading
import types
import typing
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from sklearn.linear_model import SGDClassifier
from sklearn.tree import DecisionTreeClassifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpstage.torch
import tests.torch.trainables  # noqa: F401  # as an identity does with what functions import, before anything is trained
from tests.torch import small_module

Touch = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Oddity:
    """``make`` makes what is kept as ``self.kept``, in ``__init__`` and in ``model()``; ``touch`` changes it in each
    step and gives a number that shows it; ``refused``: what the error says."""

    make: Callable[[], Any]
    touch: Touch
    refused: str | None = None
    network: Callable[[], nn.Module] | None = None


ODDITIES: dict[str, Oddity] = {}


def odd(
    name: str,
    make: Callable[[], Any] = lambda: None,
    *,
    refused: str | None = None,
    network: Callable[[], nn.Module] | None = None,
) -> Callable[[Touch], Touch]:
    def note(touch: Touch) -> Touch:
        ODDITIES[name] = Oddity(make, touch, refused, network)
        return touch

    return note


class Odd(hpstage.torch.TorchTrainable):
    device = "cpu"
    batch_size = 4
    data_version = "1"

    def __init__(self, oddity: Oddity, place: str) -> None:
        self.oddity, self.place = oddity, place
        self.steps = 0
        if place == "__init__":
            self.kept = oddity.make()

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        make = self.oddity.network or (lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 3)))
        self.net: Any = make()
        if self.place == "model":
            self.kept = self.oddity.make()
        return self.net

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def dataset(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(12, 1, 4, 4, generator=generator), torch.arange(12) % 3)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        self.steps += 1
        optimizer.zero_grad()
        touched = float(self.oddity.touch(self.kept, self))
        (self.loss(model, batch) * (1 + 0.01 * touched)).backward()
        optimizer.step()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": float(self.loss(model, self.dataset().tensors))}


# --- plain things


@odd("a SimpleNamespace", lambda: types.SimpleNamespace(n=0))
def _(kept: Any, self: Odd) -> float:
    kept.n += 1
    return kept.n


@odd("array.array", lambda: array.array("d", [0.0]))
def _(kept: Any, self: Odd) -> float:
    kept[0] += 1
    return kept[0]


@odd("array.array that grows", lambda: array.array("d", [0.0]), refused=r"self\.kept .*array")
def _(kept: Any, self: Odd) -> float:
    kept.append(1)
    return len(kept)


@odd("a number of ctypes", lambda: ctypes.c_int(0))
def _(kept: Any, self: Odd) -> float:
    kept.value += 1
    return kept.value


@odd("a shared number of multiprocessing", lambda: multiprocessing.Value("i", 0))
def _(kept: Any, self: Odd) -> float:
    kept.value += 1
    return kept.value


@odd("a bytearray", lambda: bytearray(b"a"))
def _(kept: Any, self: Odd) -> float:
    kept.append(1)
    return len(kept)


@odd("a memoryview", lambda: memoryview(bytearray(b"a")), refused=r"self\.kept is a memoryview that has changed")
def _(kept: Any, self: Odd) -> float:
    kept[0] += 1
    return kept[0]


@odd("an exception", lambda: ValueError("a"), refused=r"self\.kept is a ValueError that has changed")
def _(kept: Any, self: Odd) -> float:
    kept.args = (*kept.args, "b")
    return len(kept.args)


@odd("numbers that are not quite equal", lambda: [1, 0.0, (1,), float("nan")])
def _(kept: Any, self: Odd) -> float:
    kept[:] = [True, -0.0, (True,), float("nan")]
    return (kept[0] is True) + (str(kept[1]) == "-0.0") + (kept[2][0] is True)


@odd("a number with attributes", lambda: Count(3))
def _(kept: Any, self: Odd) -> float:
    kept.n = getattr(kept, "n", 0) + 1
    return kept.n


class Count(int):
    pass


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@odd("a member of an Enum", lambda: Colour.RED)
def _(kept: Any, self: Odd) -> float:
    self.kept = Colour.BLUE if kept is Colour.RED else Colour.RED
    return kept.value


@odd("an attribute of a member of an Enum", lambda: Colour.RED)
def _(kept: Any, self: Odd) -> float:
    kept.n = getattr(kept, "n", 0) + 1
    return kept.n


# --- containers


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


@odd("an object whose attributes cannot be asked for", NoAttributes)
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


@odd("an object whose class cannot be asked for", NoClass)
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
        self.asked: list[str] = []
        object.__setattr__(self, "n", 0)

    def __getattr__(self, name: str) -> Any:
        if "asked" in self.__dict__:
            self.asked.append(name)
        return super().__getattr__(name)


@odd("a module with slots that notes what is asked for", AskedModule)
def _(kept: Any, self: Odd) -> float:
    object.__setattr__(kept, "n", kept.n + 1)
    assert kept.inner is not None
    return kept.n + len(kept.asked)


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


# --- instances that training makes


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


# --- tensors and arrays


@odd("an array of objects", lambda: np.array([[0], {"a": 1}, None], dtype=object))
def _(kept: Any, self: Odd) -> float:
    kept[0].append(1)
    kept[2] = self.steps
    return len(kept[0]) + kept[2]


@odd("arrays of texts, dates and records", lambda: [np.array(["a", "b"]), np.zeros(2, "M8[s]"), np.zeros(2, "f4,i8")])
def _(kept: Any, self: Odd) -> float:
    texts, dates, records = kept
    texts[0] = "b" if texts[0] == "a" else "a"
    dates += np.timedelta64(1, "s")
    records["f1"] += 1
    return float(texts[0] == "a") + float(dates[0].astype("i8")) + float(records["f1"][0])


@odd("a masked array", lambda: np.ma.masked_array([0.0, 1.0, 2.0], [False, True, False]))
def _(kept: Any, self: Odd) -> float:
    kept.data[:] += 1
    kept.mask[0] = self.steps > 2
    return float(kept.sum())


@odd("arrays with steps of their own", lambda: [np.zeros((4, 4))[::2, ::2], np.arange(4.0)[::-1]])
def _(kept: Any, self: Odd) -> float:
    for values in kept:
        values += 1
    return float(kept[0][0, 0] + kept[1][0])


def mapped() -> Any:
    with tempfile.NamedTemporaryFile(delete=False) as file:
        made = np.memmap(file.name, dtype="f8", mode="w+", shape=(3,))
    made[:] = 0
    return made


@odd("a memmap that is written to", mapped, refused=r"self\.kept is a numpy\.memmap .* has changed in training")
def _(kept: Any, self: Odd) -> float:
    kept += 1
    return float(kept[0])


@odd("a memmap that is read", mapped)
def _(kept: Any, self: Odd) -> float:
    return float(kept[0])


@odd("an empty tensor that grows", lambda: torch.zeros(0))
def _(kept: Any, self: Odd) -> float:
    self.kept = torch.cat([kept, torch.ones(1)])
    return len(self.kept)


@odd("a tensor that is resized", lambda: torch.zeros(1))
def _(kept: Any, self: Odd) -> float:
    kept.resize_(len(kept) + 1).fill_(0.1)
    return float(kept.sum())


@odd("sparse tensors that training makes", lambda: torch.eye(3).to_sparse())
def _(kept: Any, self: Odd) -> float:
    self.kept = (kept * 1.1).coalesce()
    return float(self.kept.to_dense().sum())


@odd("a sparse tensor that is written to", lambda: torch.eye(3).to_sparse(), refused=r"self\.kept .*sparse_coo")
def _(kept: Any, self: Odd) -> float:
    kept.mul_(1.1)
    return float(kept.to_dense().sum())


@odd("sparse, quantized and meta tensors that never change", lambda: Untouched())
def _(kept: Any, self: Odd) -> float:
    return float(kept.rows.to_dense().sum()) + float(kept.small.dequantize().sum())


class Untouched:
    def __init__(self) -> None:
        self.rows = torch.eye(3).to_sparse_csr()
        self.small = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        self.form = torch.zeros(3, device="meta")


@odd("complex tensors, conjugated and not", lambda: [torch.ones(3, dtype=torch.complex64).conj(), torch.zeros(2, 2)])
def _(kept: Any, self: Odd) -> float:
    kept[0].add_(1j)
    return float(kept[0].imag.sum())


@odd("one value under many indices", lambda: torch.zeros(1).expand(3))
def _(kept: Any, self: Odd) -> float:
    kept.data[0].add_(1)
    return float(kept.sum())


@odd("attributes of tensors", lambda: torch.zeros(1))
def _(kept: Any, self: Odd) -> float:
    kept.n = getattr(kept, "n", 0) + 1
    weight = self.net[1].weight
    weight.seen = [*getattr(weight, "seen", []), 1]
    return kept.n + len(weight.seen)


class Marked(torch.Tensor):
    pass


class OwnParameter(nn.Parameter):
    pass


@odd("tensors of classes of their own", lambda: [torch.zeros(2).as_subclass(Marked), OwnParameter(torch.ones(2))])
def _(kept: Any, self: Odd) -> float:
    kept[0].add_(1)
    kept[1].data.add_(1)
    return float(kept[0].sum()) + float(kept[1].sum())


@odd("hooks of tensors, with a closure", lambda: Hooked())
def _(kept: Any, self: Odd) -> float:
    (kept.weight * 2).sum().backward()
    return float(kept.weight.grad.sum())


class Hooked:
    def __init__(self) -> None:
        self.weight = torch.ones(2, requires_grad=True)
        calls: list[int] = []

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return gradient * len(calls)

        self.weight.register_hook(hook)


@odd("a hook that a tensor is given in training", lambda: torch.ones(2, requires_grad=True), refused=r"a hook")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        kept.register_hook(lambda gradient: gradient * 2)
    return 0


@odd("a graph of gradients", refused=r"self\.loss_kept is a tensor that is part of a graph of gradients")
def _(kept: Any, self: Odd) -> float:
    self.loss_kept = self.net[1].weight.sum()
    return float(self.loss_kept)


# --- memory that is shared


@odd("memory that two come to share", lambda: [torch.zeros(2), torch.zeros(2)])
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        kept[1].data = kept[0].data
    kept[0].add_(1)
    return float(kept[1].sum())


def sharing() -> Any:
    one = torch.zeros(2)
    return [one, one.detach()]


@odd("memory that two share no more", sharing)
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        kept[1].data = kept[1].data.clone()
    kept[0].add_(1)
    return float(kept[1].sum())


@odd("memory that is exchanged", lambda: [torch.zeros(2), torch.ones(2)])
def _(kept: Any, self: Odd) -> float:
    kept[0].data, kept[1].data = kept[1].data, kept[0].data
    kept[0].add_(1)
    return float(kept[0].sum())


@odd("views that training makes of what was there", lambda: torch.ones(4))
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.part, self.bits, self.outside = kept[1:], kept.view(torch.int32), kept.numpy()
    if self.steps > 2:
        self.part.add_(1)
        self.bits[0] += 1 << 20
        self.outside += 0.5
    return min(float(kept.sum()), 50)


@odd("views that training makes of what it has made")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.whole = torch.zeros(4)
        self.part, self.outside = self.whole[1:], self.whole.numpy()
    if self.steps > 2:
        self.part.add_(1)
        self.outside += 0.5
    return float(self.whole.sum()) if self.steps >= 2 else 0


@odd("a view that training makes of an array", lambda: np.zeros(3))
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.part = kept[1:]
    if self.steps > 2:
        self.part += 1
    return float(kept.sum())


@odd("gradients in one piece of memory")
def _(kept: Any, self: Odd) -> float:
    weight, bias = self.net[2].weight, self.net[2].bias
    if self.steps == 2:
        self.flat = torch.zeros(weight.numel() + bias.numel())
        self.views = [self.flat[: weight.numel()].view_as(weight), self.flat[weight.numel() :]]
    if self.steps > 2:
        self.flat.add_(0.1)
    return float(self.views[1].sum()) if self.steps >= 2 else 0


# --- code


CACHED: list[int] = []
CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("CONTEXT", default=0)
LOCAL = threading.local()


@odd("a context variable")
def _(kept: Any, self: Odd) -> float:
    CONTEXT.set(CONTEXT.get() + 1)
    return CONTEXT.get()


@odd("a global variable of this thread's")
def _(kept: Any, self: Odd) -> float:
    LOCAL.n = getattr(LOCAL, "n", 0) + 1
    return LOCAL.n


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


# --- things that stand somewhere


@odd("a count", itertools.count, refused=r"self\.kept is a itertools\.count that has moved on")
def _(kept: Any, self: Odd) -> float:
    return next(kept)


@odd("a generator", lambda: (n for n in range(99)), refused=r"self\.kept is a generator that has moved on")
def _(kept: Any, self: Odd) -> float:
    return next(kept)


@odd("a file in memory", lambda: io.StringIO("0"), refused=r"self\.kept is a _io\.StringIO that has been read or wri")
def _(kept: Any, self: Odd) -> float:
    kept.seek(0)
    kept.write(str(self.steps % 10))
    kept.seek(0)
    return int(kept.getvalue())


@odd("a lock that is held", threading.Lock, refused=r"self\.kept is a _thread\.lock that has changed")
def _(kept: Any, self: Odd) -> float:
    return kept.acquire(blocking=False)


@odd("locks, loggers and counters of one owner", lambda: Owner())
def _(kept: Any, self: Odd) -> float:
    with kept.lock:
        kept.log.debug("a step")
        kept.n += 1
    return kept.n


class Owner:
    def __init__(self) -> None:
        self.lock, self.event, self.log = threading.RLock(), threading.Event(), logging.getLogger("hpstage.tests")
        self.function, self.kind, self.module = nn.functional.relu, nn.Linear, sys
        self.n = 0


@odd("a DataLoader", lambda: DataLoader(torch.arange(8.0), batch_size=2, shuffle=True))
def _(kept: Any, self: Odd) -> float:
    return sum(float(batch.sum()) * index for index, batch in enumerate(kept))


@odd("an iterator of a DataLoader", lambda: iter(DataLoader(torch.arange(50.0))), refused=r"self\.kept\._")
def _(kept: Any, self: Odd) -> float:
    return float(next(kept))


# --- other libraries


@odd("a table that is read", lambda: pd.DataFrame({"a": [0.0, 1.0]}))
def _(kept: Any, self: Odd) -> float:
    return float(kept["a"].sum())


@odd("a table that is written to", lambda: pd.DataFrame({"a": [0.0, 1.0]}), refused=r"self\.kept\._mgr ")
def _(kept: Any, self: Odd) -> float:
    kept.loc[0, "a"] += 1
    return float(kept["a"].sum())


@odd("an estimator that is used", lambda: DecisionTreeClassifier(random_state=0).fit(np.eye(3), [0, 1, 2]))
def _(kept: Any, self: Odd) -> float:
    return float(kept.predict(np.eye(3)).sum())


@odd("an estimator that is trained", lambda: SGDClassifier(random_state=0), refused=r"self\.kept\._")
def _(kept: Any, self: Odd) -> float:
    kept.partial_fit(np.eye(3), [0, 1, 2], classes=[0, 1, 2])
    return float(kept.coef_.sum()) / 1000


# --- kinds of models


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
    """It goes on from where it stood."""

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
    "a recurrent network that goes on": Recurrent,
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
    "weights that are made anew at each step, in a graph",
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
