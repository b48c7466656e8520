"""The standard streams of processes that are started: those of this process, as far as it has them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def outputs() -> Iterator[tuple[int, int]]:
    """Yield file descriptors for the standard output and error of a process to be started.

    A process may run without standard streams. A file that it opens later may then get descriptor 0, 1 or 2: training
    would print into a database, or into the socket of a training process. So free ones of these descriptors are
    occupied first, for the life of this process.
    """
    while (nothing := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    try:
        yield 1 if sys.__stdout__ is not None else nothing, 2 if sys.__stderr__ is not None else nothing
    finally:
        os.close(nothing)
