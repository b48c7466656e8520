"""What a process keeps: threads of the user's, caches, settings."""

from __future__ import annotations

import abc
import collections.abc
import decimal
import functools
import os
import socket
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from sys import setrecursionlimit as limit_recursion
from typing import Any

import numpy
import torch

from tests.torch.oddities.oddity import Odd, odd

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


@odd("which decimal numbers are errors")
def _(kept: Any, self: Odd) -> float:
    traps = decimal.getcontext().traps
    was = traps[decimal.FloatOperation]
    if self.steps == 2:
        traps[decimal.FloatOperation] = True
    return was


class Kind(abc.ABC):  # noqa: B024
    pass


class Registered:
    pass


@odd("a class registered with an abstract one", refused="Registered has been registered with Kind in training")
def _(kept: Any, self: Odd) -> float:
    was = isinstance(Registered(), Kind)
    if self.steps == 2:
        Kind.register(Registered)
    return was


@odd(
    "a class registered with an abstract one of a library",
    refused=r"Registered has been registered with collections\.abc\.Sequence in training",
)
def _(kept: Any, self: Odd) -> float:
    was = isinstance(Registered(), collections.abc.Sequence)
    if self.steps == 2:
        collections.abc.Sequence.register(Registered)
    return was


@odd("what C keeps, set and returned by a pair of functions")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        socket.setdefaulttimeout(7)
    return socket.getdefaulttimeout() or 0


@odd("what a pair of functions sets, imported by another name")
def _(kept: Any, self: Odd) -> float:
    limit_recursion(sys.getrecursionlimit() + 1)
    return sys.getrecursionlimit()


@odd("which generator of NumPy's is the global one")
def _(kept: Any, self: Odd) -> float:
    if self.steps == 2:
        numpy.random.set_bit_generator(numpy.random.PCG64(1))
    return float(numpy.random.random())


@odd("how arrays are printed")
def _(kept: Any, self: Odd) -> float:
    numpy.set_printoptions(precision=self.steps)
    return len(str(numpy.array([1 / 3])))


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
