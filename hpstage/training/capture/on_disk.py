"""Files, memory maps and HDF5 files that training opens for reading: a state names them, and a fork reopens them.

A fork refuses a file if a sample shows that its content has changed.
"""

from __future__ import annotations

import io
import mmap
import os
import stat
import sys
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


def is_read_only_hdf5(obj: Any) -> bool:
    """Return whether an h5py object belongs to a file that is open for reading only, or to no file. Training cannot
    change such an object: it has no position, only caches and numbers that differ between processes."""
    library = sys.modules.get("h5py")
    if library is None or type(obj).__module__.partition(".")[0] != "h5py":
        return False
    try:
        file = library.h5i.get_file_id(getattr(obj, "id", obj))
    except Exception:  # it describes a type or a way to read, or its file is closed
        return True
    return bool(file.get_intent() == library.h5f.ACC_RDONLY)


def where_hdf5_is(value: Any) -> Where | None:
    """Return path, sample, and name within the file, of an HDF5 file, group or data set that is open for reading only;
    ``None`` for any other object."""
    library = sys.modules.get("h5py")
    if library is None or type(value) not in (library.File, library.Group, library.Dataset):
        return None
    if not value or not is_read_only_hdf5(value) or value.file.driver != "sec2" or value.name is None:
        return None
    if not all(name.startswith("_") for name in vars(value)):  # other attributes are the user's
        return None
    path = _path(value.file.filename)
    return None if path is None else (path, _sample_of_path(path), "" if type(value) is library.File else value.name)


def opened_hdf5(path: str, sampled: str, name: str) -> Any:
    library = sys.modules.get("h5py")
    if library is None:
        raise StateError("the state has an HDF5 file, and h5py is not imported here: import it in your module")
    with _as_before(path):
        if _sample_of_path(path) != sampled:
            raise OSError(_CHANGED)
        file = library.File(path, "r")
    try:
        return file[name] if name else file
    except KeyError as error:
        raise StateError(f"{path} has no {name}") from error


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


def _sample_of_path(path: str) -> str:
    with open(path, "rb") as file:
        return _sample_of_file(file)


def _sample_of_file(file: Any) -> str:
    if not os.fstat(file.fileno()).st_size:
        return ""
    # Not read(): that would move the position.
    return _sample_of(numpy().frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), "u1"))


def _sample_of(array: Any) -> str:
    return sample(array.view(numpy().ndarray), True)[0] + f" of {array.nbytes}"
