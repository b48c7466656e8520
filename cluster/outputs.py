"""The standard streams of processes that are started: those of this process, as far as it has them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def outputs() -> Iterator[tuple[int, int]]:
    """Yield file descriptors for the standard output and error of a process to be started.

    A service may be started without the standard streams, or close them. A file that is opened later may then get one
    of their numbers: a database into which training would print, or the socket of a training process. So numbers that
    are free are taken first, for as long as this process lives.
    """
    while (nothing := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    try:
        yield 1 if sys.__stdout__ is not None else nothing, 2 if sys.__stderr__ is not None else nothing
    finally:
        os.close(nothing)
