"""Python's own objects, many of which nothing can look into."""

from __future__ import annotations

import asyncio
import collections
import csv
import functools
import hashlib
import itertools
import multiprocessing
import queue
import re
import sqlite3
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np

from tests.torch.oddities.oddity import Odd, odd

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
