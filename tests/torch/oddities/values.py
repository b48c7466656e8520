"""Plain values that change: numbers, arrays of bytes, exceptions, members of an Enum."""

from __future__ import annotations

import array
import ctypes
import enum
import multiprocessing
import types
from typing import Any

import numpy as np

from tests.torch.oddities.oddity import Odd, odd


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


@odd("a memoryview", lambda: memoryview(bytearray(b"a")))
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


@odd(
    "a number of more than 64 bits", lambda: np.longdouble(0), refused=r"self\.kept holds a .*longdouble that training"
)
def _(kept: Any, self: Odd) -> float:
    self.kept = kept + np.longdouble(1)
    return float(kept)
