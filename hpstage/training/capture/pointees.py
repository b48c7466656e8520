"""Pointers of ctypes: where they are in an object, and the objects that they point to."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from typing import Any

from hpstage.training.capture.kind import SMALLEST_ADDRESS
from hpstage.training.code.owner import by_type

_LIBRARY: Any = ctypes  # typeshed lacks _CFuncPtr
_FUNCTION = _LIBRARY._CFuncPtr
_POINTERS = ctypes._Pointer, _FUNCTION, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_wchar_p, ctypes.py_object
DATA: Any = ctypes.c_int.__mro__[-2]  # the base of all objects with memory
_SIZE = ctypes.sizeof(ctypes.c_void_p)


class Address(str):
    """The bytes of a ctypes object that contains a pointer. No state can hold them, since addresses differ between
    processes."""

    __slots__ = ()


def points(obj: Any, content: bytes) -> bool:
    """Return whether a ctypes object with this memory is, or contains, a pointer that is not null."""
    numbers = (int.from_bytes(content[at : at + _SIZE], sys.byteorder) for at in _offsets(type(obj)))
    return any(number >= SMALLEST_ADDRESS for number in numbers)


@by_type
def _offsets(kind: Any) -> tuple[int, ...]:
    """Return the offsets in bytes of the pointers in an instance."""
    if issubclass(kind, _POINTERS):
        return (0,)
    if issubclass(kind, ctypes.Array):
        size, inner = ctypes.sizeof(kind._type_), _offsets(kind._type_)
        return tuple(index * size + at for index in range(kind._length_) for at in inner) if inner else ()
    if issubclass(kind, ctypes.Structure | ctypes.Union):
        own = [(base, *field) for base in kind.__mro__ for field in vars(base).get("_fields_", ())]
        return tuple(vars(base)[name].offset + at for base, name, of_type, *_ in own for at in _offsets(of_type))
    return ()


def of(obj: Any) -> list[Any]:
    """Return the objects that a ctypes object points to and keeps alive: none for a function of a shared library, which
    points to code."""
    return [*_leaves(obj._objects)] if isinstance(obj, DATA) and not isinstance(obj, _FUNCTION) else []


def _leaves(kept: Any) -> Iterator[Any]:
    """Yield the objects that a ctypes object keeps alive, which are in nested dicts by the index of the field.

    A ``memoryview`` is omitted: it shows the memory that the object itself lies in (``from_buffer``), of which the
    object reaches only its own bytes. All shared numbers of multiprocessing have the same one."""
    if type(kept) is dict:
        for part in kept.values():
            yield from _leaves(part)
    elif kept is not None and not isinstance(kept, ctypes.CDLL | bytes | str | memoryview):
        yield kept
