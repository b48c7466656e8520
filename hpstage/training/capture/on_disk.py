"""Files and memory maps that training opens for reading: a state names them, and a fork reopens them.

They are refused if a sample shows that their content has changed.
"""

from __future__ import annotations

import io
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hpstage.errors import StateError
from hpstage.training.capture.kind import numpy
from hpstage.training.capture.stateful import is_for_reading
from hpstage.training.capture.values import cannot_change, sample

Where = tuple[Any, ...]


def where_file_is(file: Any) -> Where | None:
    """Return path, sample, position, and whether it is buffered; ``None`` if the file cannot be reopened."""
    buffered = type(file) is io.BufferedReader
    raw = file.raw if buffered else file
    if type(raw) is not io.FileIO or raw.closed or not is_for_reading(raw):
        return None
    path = _path(raw.name)
    if path is None or not os.path.samestat(os.stat(path), os.fstat(raw.fileno())):
        return None
    return path, _sample_of_file(raw), file.tell(), buffered


def opened_file(path: str, sampled: str, position: int, buffered: bool) -> Any:
    with _as_before(path):
        file: Any = open(path, "rb", buffering=-1 if buffered else 0)  # noqa: SIM115  # it is the trainable's
        if _sample_of_file(file) != sampled:
            file.close()
            raise OSError(_CHANGED)
        file.seek(position)
    return file


def where_map_is(array: Any) -> Where | None:
    """Return path, sample, offset and order of a read-only memmap; ``None`` if it is writable or part of another."""
    path = _path(array.filename)
    if path is None or not cannot_change(array) or array.base is not array._mmap:
        return None
    return path, _sample_of(array), array.offset, "C" if array.flags.c_contiguous else "F"


def opened_map(path: str, sampled: str, offset: int, order: Any, dtype: Any, shape: Any) -> Any:
    with _as_before(path):
        array = numpy().memmap(path, dtype=dtype, mode="r", offset=offset, shape=tuple(shape), order=order)
        if _sample_of(array) != sampled:
            raise OSError(_CHANGED)
    return array


_CHANGED = "its content has changed"


def _path(name: object) -> str | None:
    """Return the path of a file of that name, or ``None`` if it has no name or no longer exists."""
    if not isinstance(name, str | os.PathLike):
        return None
    path = os.path.abspath(name)
    return path if os.path.isfile(path) else None


@contextmanager
def _as_before(path: str) -> Iterator[None]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening anything else could block forever
            raise OSError("it is not a regular file")
        yield
    except (OSError, ValueError) as error:
        raise StateError(
            f"training has opened {path} for reading, and here it cannot be opened as it was ({error}): keep it where "
            f"every worker finds it, or load what training needs in dataset() or __init__()"
        ) from error


def _sample_of_file(file: Any) -> str:
    if not os.fstat(file.fileno()).st_size:
        return ""
    # Not read(): that would move the position.
    return _sample_of(numpy().frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), "u1"))


def _sample_of(array: Any) -> str:
    return sample(array.view(numpy().ndarray), True)[0] + f" of {array.nbytes}"
