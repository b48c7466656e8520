"""Base class of kinds of mutable objects: how the content of an object is read, compared, and restored.

The content of an object is shallow: a list's items, an instance's attributes. Objects in it are separate objects.
Nothing here calls the user's code: attributes, items and types are read regardless of what a class overrides.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import decimal
import enum
import fractions
import pathlib
import re
import struct
import sys
import threading
import types
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from operator import is_
from typing import Any

from hpstage.training.code.attributes import has_dict, own_of
from hpstage.training.code.owner import by_type

Child = tuple[str, object]
"""A label to append to the owner's path, and the object at that path."""

_ATOMS = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes),
        *(type(...), type(NotImplemented), range, slice, re.Pattern, re.Match, struct.Struct, property),
        *(types.ModuleType, types.CodeType, types.MemberDescriptorType, types.GetSetDescriptorType),
        *(types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType),
        *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone),
        *(decimal.Decimal, fractions.Fraction, uuid.UUID, pathlib.PosixPath, pathlib.PurePosixPath),
    )
)

RUNNERS = (threading.Thread, concurrent.futures.Executor)

_bits = struct.Struct("d").pack
SMALLEST_ADDRESS = 1 << 32
"""Smaller numbers are not addresses: all objects of a process lie above."""

LEADS_NOWHERE = frozenset((type(None), bool, int, float, str, bytes))


class Captured:
    """Base class of hpstage's own classes whose instances are captured as the user's are. All others are machinery."""


def torch() -> Any:
    """Return torch if this process has imported it; otherwise no object here can belong to it."""
    return sys.modules.get("torch")


def numpy() -> Any:
    """Return NumPy, which every training process imports (:func:`hpstage.training.identity.threads.pin`)."""
    import numpy as library

    return library


@by_type
def is_atomic(kind: Any) -> bool:
    if kind in _ATOMS or issubclass(kind, type | enum.Enum):
        return True
    library = torch()
    if library is not None and issubclass(
        kind, (library.dtype, library.device, library.Size, library.layout, library.memory_format)
    ):
        return True
    library = numpy()
    if issubclass(kind, library.generic):
        return not issubclass(kind, library.void) and not has_dict(kind)  # a void can be written to
    return issubclass(kind, library.dtype)


def is_atom(value: object) -> bool:
    """Return whether a value is immutable and holds nothing, so that only its type and value count."""
    return is_atomic(type(value))


def same_value(one: Any, other: Any) -> bool:
    """Return whether two entries of contents are the same: one object, equal atoms, or tuples of the same items."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is float:
        return _bits(one) == _bits(other)  # 0.0 is not -0.0, and nan is nan
    if kind is tuple:
        return len(one) == len(other) and all(map(same_value, one, other))
    if is_atomic(kind):
        if kind in LEADS_NOWHERE:
            return bool(one == other)
        return (bool(one == other) and repr(one) == repr(other)) or (one != one and repr(one) == repr(other))
    if kind is types.MethodType:
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    if kind is types.BuiltinFunctionType or kind is types.MethodWrapperType:
        return bool(one == other)
    if kind is weakref.ref:
        return one() is not None and one() is other()
    if kind is frozenset:
        return {*map(id, one)} == {*map(id, other)} or bool(
            all(map(is_atom, one)) and all(map(is_atom, other)) and one == other
        )
    if issubclass(kind, tuple) and not own_of(one) and not own_of(other):
        return same_items(items_of(one), items_of(other))
    return False


@by_type
def is_struct(kind: Any) -> bool:
    """Return whether a class is a struct sequence: a tuple with named fields that is written in C, such as
    ``torch.return_types.max`` and ``time.struct_time``. Struct sequences have no subclasses."""
    made_by = vars(kind).get("__new__")
    return issubclass(kind, tuple) and "n_sequence_fields" in vars(kind) and type(made_by) is types.BuiltinFunctionType


def items_of(value: Any) -> list[Any]:
    """Return the items of a tuple of any class; for a struct sequence, also its fields that are no items."""
    items = list(tuple.__iter__(value))
    return [*items, *value.__reduce__()[1][1].values()] if is_struct(type(value)) else items


def same_items(old: list[Any], new: list[Any]) -> bool:
    return len(old) == len(new) and (all(map(is_, old, new)) or all(map(same_value, old, new)))


def same_mapping(old: dict[Any, Any], new: dict[Any, Any]) -> bool:
    """Return whether keys, values and their order are the same."""
    if not old or len(old) != len(new):
        return len(old) == len(new)
    return (all(map(is_, old.values(), new.values())) or all(map(same_value, old.values(), new.values()))) and (
        all(map(is_, old, new)) or all(map(same_value, old, new))
    )


class Kind(ABC):
    """Defines how objects of some types are read, compared and restored. Stateless."""

    name: str

    @abstractmethod
    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        """Return the content, detached from the object: it does not change when the object does."""

    def again(self, obj: Any, skip: frozenset[str], old: Any) -> Any:
        """Return ``old`` itself if the content is unchanged, else the present content."""
        new = self.read(obj, skip)
        return old if self.same(old, new) else new

    def same(self, old: Any, new: Any) -> bool:
        return same_value(old, new)

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        """Restore content returned by :meth:`read`. Raises ``TypeError`` if that is impossible."""
        raise TypeError(f"the inside of a {type(obj).__qualname__} cannot be set")

    def children(self, content: Any) -> Iterator[Child]:
        return iter(())

    def weakly(self, content: Any) -> Iterator[Child]:
        """Yield the objects to which it has weak references."""
        return iter(())


class Kept(Kind):
    """Objects of which nothing has to be restored. The objects that they hold are restored by their own kinds."""

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        pass


class Opaque(Kept):
    """Objects that do not decide training (a lock, a logger, compiled code) or cannot be inspected. They are compared
    by identity alone: a replacement is detected, a change inside is not."""

    name = "opaque"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return None


def attribute_children(content: dict[str, Any]) -> Iterator[Child]:
    for name, value in content.items():
        if type(value) not in LEADS_NOWHERE:
            yield f".{name}", value
