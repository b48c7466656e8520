"""The hidden part of a set: where its members lie in its table, and where ``pop()`` looks next.

Iteration and ``pop()`` return the members of a set in an order that depends on all its earlier members. CPython holds
this order in fields that no method returns (``Objects/setobject.c``).
"""

from __future__ import annotations

import ctypes
import decimal
import fractions
from typing import Any

from hpstage.training.capture.kind import numpy

Layout = tuple[int, bytes]
"""Where ``pop()`` looks next, and for each slot of the table the hash of its member, or 0 or -1 if it has none."""


class _Fields(ctypes.Structure):
    _fields_ = (
        ("fill", ctypes.c_ssize_t),
        ("used", ctypes.c_ssize_t),
        ("mask", ctypes.c_ssize_t),
        ("table", ctypes.c_void_p),
        ("hash", ctypes.c_ssize_t),
        ("finger", ctypes.c_ssize_t),
    )


def _fields(obj: Any) -> _Fields:
    return _Fields.from_address(id(obj) + object.__basicsize__)


def _can_be_read() -> bool:
    sample = {1, 2, 3}
    sample.pop()
    fields = _fields(sample)
    if ctypes.sizeof(ctypes.c_ssize_t) != 8:
        return False
    return (fields.fill, fields.used, fields.mask, fields.finger) == (3, 2, 7, 2)


_READABLE = _can_be_read()


def layout_of(obj: Any) -> Layout | None:
    """Return the layout of a set, or ``None`` if this Python keeps it elsewhere."""
    if not _READABLE:
        return None
    fields = _fields(obj)
    table = memoryview(ctypes.string_at(fields.table, 16 * (fields.mask + 1))).cast("q")  # addresses and hashes
    return fields.finger, table[1::2].tobytes()


def empty(obj: Any, layout: Layout | None = None) -> None:
    """Remove all members from a set, and make its ``pop()`` start where ``layout`` has it start, by default as in a new
    set: ``clear()`` does not change where it starts."""
    set.clear(obj)
    if _READABLE:
        _fields(obj).finger = 0 if layout is None else layout[0]


def hash_is_fixed(item: Any) -> bool:
    """Return whether a value has the same hash in all processes, so that the order of a set of such values depends only
    on its present and earlier members."""
    kind = type(item)
    if kind is tuple or kind is frozenset:
        return all(map(hash_is_fixed, item))
    return kind in _NUMBERS or issubclass(kind, numpy().number | numpy().bool_)


_NUMBERS = (int, float, bool, complex, decimal.Decimal, fractions.Fraction)
