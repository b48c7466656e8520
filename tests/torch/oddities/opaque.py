"""Objects that nothing can look into, objects that a name made one pass by, code made by a call, and state that begins
late."""

from __future__ import annotations

import copy
import csv
import dataclasses
import enum
import functools
import hashlib
import inspect
import io
import itertools
import logging
import queue
import random
import sqlite3
import types
import weakref
import zlib
from typing import Any, ClassVar, TypeVar

import rich.console
import torch
import tqdm
from PIL import Image
from torch import nn

from tests.torch.oddities.oddity import Odd, odd

# --- objects written in C, in a global name and in attributes

HASH = hashlib.sha256()
CONNECTION = sqlite3.connect(":memory:")
QUEUE: queue.SimpleQueue[int] = queue.SimpleQueue()
READER = csv.reader(itertools.cycle(["1", "2", "3"]))
PACKED = zlib.compressobj()
HELD = {"a": [hashlib.md5()]}


@odd("a hash in a global name", refused=r"opaque:HASH is a _hashlib\.HASH, which nothing can look into")
def _(kept: Any, self: Odd) -> float:
    HASH.update(b"a")
    return HASH.digest()[0] / 256


@odd("a database in a global name", refused=r"opaque:CONNECTION is a sqlite3\.Connection")
def _(kept: Any, self: Odd) -> float:
    CONNECTION.execute("create table if not exists t (x)").execute("insert into t values (1)")
    return float(CONNECTION.execute("select count(*) from t").fetchone()[0])


@odd("a queue in a global name", refused=r"opaque:QUEUE is a _queue\.SimpleQueue")
def _(kept: Any, self: Odd) -> float:
    QUEUE.put(1)
    return float(QUEUE.qsize())


@odd("a reader in a global name", refused=r"opaque:READER is a _csv\.reader")
def _(kept: Any, self: Odd) -> float:
    return float(next(READER)[0])


@odd("a compressor in a global name", refused=r"opaque:PACKED is a zlib\.Compress")
def _(kept: Any, self: Odd) -> float:
    return float(len(PACKED.compress(b"a" * 1000) + PACKED.flush(zlib.Z_SYNC_FLUSH)))


@odd("a hash in a list in a dict in a global name", refused=r"opaque:HELD'?\['a'\]\[0\] is a _hashlib\.HASH")
def _(kept: Any, self: Odd) -> float:
    HELD["a"][0].update(b"a")
    return HELD["a"][0].digest()[0] / 256


@odd("a hash that a function closes over", refused=r"is a _hashlib\.HASH")
def _(kept: Any, self: Odd) -> float:
    return _counted() / 256


def _count() -> Any:
    inner = hashlib.sha256()

    def count() -> int:
        inner.update(b"a")
        return inner.digest()[0]

    return count


_counted = _count()


@odd(
    "an image that is drawn into",
    lambda: Image.new("L", (4, 3)),
    refused=r"self\.kept\._?im is a ImagingCore that has changed",
)
def _(kept: Any, self: Odd) -> float:
    kept.putpixel((self.steps % 4, 0), 9)
    return float(kept.getpixel((1, 0)))


# --- objects of libraries of which only what is read counts


@odd("a progress bar's own counter", lambda: tqdm.tqdm(total=9, disable=True))
def _(kept: Any, self: Odd) -> float:
    kept.n += 1
    return float(kept.n)


@odd("a console that has logged", lambda: rich.console.Console(file=io.StringIO()))
def _(kept: Any, self: Odd) -> float:
    kept.log(self.steps)  # it keeps the time that it has shown last
    return float(self.steps)


@odd("a profiler's step", lambda: torch.profiler.profile(schedule=lambda step: torch.profiler.ProfilerAction.NONE))
def _(kept: Any, self: Odd) -> float:
    kept.step()
    return float(kept.step_num)


@odd("an attribute that a progress bar is given", lambda: tqdm.tqdm(total=9, disable=True))
def _(kept: Any, self: Odd) -> float:
    kept.given = getattr(kept, "given", 0) + 1
    return float(kept.given)


@odd("a progress bar's counter by a property", lambda: tqdm.tqdm(total=9, file=io.StringIO()))
def _(kept: Any, self: Odd) -> float:
    kept.update(2)
    return float(kept.format_dict["n"])


def called(x: int, y: int = 0) -> int:
    return x + y


@odd("arguments that a signature has bound", lambda: inspect.signature(called).bind(0))
def _(kept: Any, self: Odd) -> float:
    kept.arguments["x"] += 1
    return called(*kept.args)


@odd("an attribute of a type variable")
def _(kept: Any, self: Odd) -> float:
    ANY.lookups = getattr(ANY, "lookups", 0) + 1  # type: ignore[attr-defined]
    return ANY.lookups  # type: ignore[attr-defined,no-any-return]


ANY = TypeVar("ANY")


@odd("an attribute of a mode that is entered", lambda: torch.autocast("cpu", enabled=False))
def _(kept: Any, self: Odd) -> float:
    kept.lookups = getattr(kept, "lookups", 0) + 1
    with kept:
        return kept.lookups


class Drawn(random.SystemRandom):
    lookups = 0

    def random(self) -> float:
        self.lookups += 1
        return self.lookups / 10


@odd("an attribute of the user's own kind of the system's random numbers", Drawn)
def _(kept: Any, self: Odd) -> float:
    return kept.random()


class Counting(logging.Handler):
    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


LOGGER = logging.getLogger(__name__)
LOGGER.propagate = False
HANDLER = Counting()
LOGGER.addHandler(HANDLER)
LOGGER.setLevel(logging.INFO)


@odd("a handler of one's own that a logger has")
def _(kept: Any, self: Odd) -> float:
    LOGGER.info("a step")
    return float(HANDLER.count)


@odd("what a logger adapter adds", lambda: logging.LoggerAdapter(LOGGER, {"n": 0}))
def _(kept: Any, self: Odd) -> float:
    kept.extra["n"] += 1
    return float(kept.extra["n"])


@odd("a logger's level")
def _(kept: Any, self: Odd) -> float:
    LOGGER.setLevel(LOGGER.level + 1)
    return float(LOGGER.level)


# --- functions and classes that no def in a file has made

SPACE: dict[str, Any] = {"n": 0}
exec("def tick():\n    global n\n    n += 1\n    return n", SPACE)
TICK = SPACE["tick"]
Made = type("Made", (nn.Identity,), {"count": 0})
Fields = dataclasses.make_dataclass("Fields", [("n", int, 0)], namespace={"shared": [0]})
Level = enum.Enum("Level", {"LOW": 1})
Plain = types.new_class("Plain", (), {}, lambda space: space.update(n=0))


@odd("a global of a function made by exec")
def _(kept: Any, self: Odd) -> float:
    return float(TICK())


@odd("an attribute of a class made by type()", network=lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3), Made()))
def _(kept: Any, self: Odd) -> float:
    Made.count += 1  # type: ignore[attr-defined]
    return float(Made.count)  # type: ignore[attr-defined]


@odd("a list of a class made by make_dataclass", lambda: Fields())
def _(kept: Any, self: Odd) -> float:
    kept.shared[0] += 1
    kept.n += 1
    return float(kept.shared[0] + kept.n)


@odd("an attribute of a member of an enum made by a call")
def _(kept: Any, self: Odd) -> float:
    Level.LOW.seen = getattr(Level.LOW, "seen", 0) + 1  # type: ignore[attr-defined]
    return float(Level.LOW.seen)  # type: ignore[attr-defined]


@odd("an attribute of a class made by new_class")
def _(kept: Any, self: Odd) -> float:
    Plain.n += 1
    return float(Plain.n)


# --- state that begins late


@odd("an average that begins late")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 3:
        self.average = [p.detach().clone() for p in self.net.parameters()]
    if self.steps > 3:
        for mine, p in zip(self.average, self.net.parameters(), strict=True):
            mine.lerp_(p.detach(), 0.5)
    return float(self.average[0].sum()) if self.steps >= 3 else 0.0


@odd("an average by id() of the weights", refused=r"holds the id\(\) of")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.by_id = {id(p): p.detach().clone() for p in self.net.parameters()}
    return float(next(iter(self.by_id.values())).sum()) if self.steps >= 2 else 0.0


@odd("a table by hash() of the weights", refused=r"holds the id\(\) of")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.by_hash = {hash(p): self.steps for p in self.net.parameters()}
    return float(len(self.by_hash)) if self.steps >= 2 else 0.0


@odd("addresses of memory in a list", refused=r"holds the id\(\) of")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        self.pointers = [p.data_ptr() for p in self.net.parameters()]
    return float(self.steps)


@odd("a second model and optimizer that begin late")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 3:
        self.critic = copy.deepcopy(self.net[1])
        self.second = torch.optim.Adam(self.critic.parameters(), lr=0.1)
    if self.steps >= 3:
        self.second.zero_grad()
        self.critic(torch.ones(1, 16)).sum().backward()
        self.second.step()
        return float(self.critic.weight.sum())
    return 0.0


@odd("a hook that is added late, of a function with a counter")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 3:
        self.net[1].register_forward_hook(late)
    return float(late.calls)  # type: ignore[attr-defined]


def late(module: nn.Module, arguments: Any, output: Any) -> Any:
    late.calls += 1  # type: ignore[attr-defined]
    return output * 1.1


late.calls = 0  # type: ignore[attr-defined]


class Reference:
    def __init__(self) -> None:
        self.last = 0.0

    @functools.cache  # noqa: B019
    def first(self) -> float:
        return self.last


@odd("a cached result of a method, of what training changes", Reference, refused=r"has cached a result for self\.kept")
def _(kept: Any, self: Odd) -> float:
    kept.last += 1
    return kept.first() if self.steps > 1 else 0.0


class Fixed:
    @functools.lru_cache(8)  # noqa: B019
    def positions(self, n: int) -> int:
        return n * n


@odd("a cached result of a method, of what stays as it is", Fixed)
def _(kept: Any, self: Odd) -> float:
    return float(kept.positions(self.steps))


LEVEL: dict[str, int] = {"n": 0}


@functools.lru_cache(8)
def by_level(bucket: int) -> int:
    return LEVEL["n"] + bucket


@odd(
    "a cached result, of a global that training changes", refused=r"depends on \S*opaque:LEVEL, which training changes"
)
def _(kept: Any, self: Odd) -> float:
    LEVEL["n"] += 1
    return by_level(self.steps % 2)


def closing_over_a_list() -> Any:
    level = [0]
    return [level, functools.cache(lambda bucket: level[0] + bucket)]


@odd(
    "a cached result, of what its function closes over", closing_over_a_list, refused=r"has cached a result that depend"
)
def _(kept: Any, self: Odd) -> float:
    kept[0][0] += 1
    return kept[1](self.steps % 2)


@functools.cache
def norm() -> float:
    return float(MODELS[-1].weight.norm())


MODELS: list[Any] = []


def in_a_global() -> nn.Module:
    made = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    MODELS[:] = [made[1]]
    return made


@odd("a cached result, of weights", refused=r"result that depends on model\.1\.weight", network=lambda: in_a_global())
def _(kept: Any, self: Odd) -> float:
    return norm()


SCALES = {"a": 2.0}


@functools.cache
def scale(name: str) -> float:
    return SCALES[name]


@odd("a cached result, of a global that stays as it is")
def _(kept: Any, self: Odd) -> float:
    return scale("a")


class Above:
    def value(self) -> float:
        return 0.0


class Below(Above):
    values: ClassVar[list[float]] = []

    def value(self) -> float:
        self.values.append(1.0)
        return float(len(self.values))


@odd("a class that is found among the subclasses of another")
def _(kept: Any, self: Odd) -> float:
    return Above.__subclasses__()[0]().value()


class Live:
    count = 0

    def __init__(self) -> None:
        Live.count += 1

    def __del__(self) -> None:
        Live.count -= 1


@odd("an object that acts when it ends, and that training drops", lambda: [Live(), Live()], refused=r"self\.kept\[1\] ")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        kept.pop()
    return float(Live.count)


FREE: list[int] = []


def with_finalizer(number: int) -> Above:
    made = Above()
    weakref.finalize(made, FREE.append, number)
    return made


@odd("an object with a finalizer, that training drops", lambda: [with_finalizer(1)], refused=r"self\.kept\[0\] ")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        kept.pop()
    return float(len(FREE))


@odd("an object with a finalizer, that training makes", list, refused=r"self\.kept\[0\] holds a \S+Above that")
def _(kept: Any, self: Odd) -> float:
    kept[:] = [with_finalizer(self.steps)]
    return float(sum(FREE))


@odd(
    "a weak reference to an object that training drops",
    lambda: [made := [Above()], weakref.ref(made[0])],
    refused=r"self\.kept\[0\]\[0\] is referred to weakly",
)
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        kept[0].pop()
    return float(kept[1]() is None)
