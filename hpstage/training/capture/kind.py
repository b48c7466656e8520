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
import functools
import pathlib
import re
import struct
import sys
import threading
import types
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any, TypeVar

from hpstage.training.code.owner import HEAP

_T = TypeVar("_T")
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

LEADS_NOWHERE = frozenset((type(None), bool, int, float, str, bytes))


def torch() -> Any:
    """Return torch if this process has imported it; otherwise no object here can belong to it."""
    return sys.modules.get("torch")


def numpy() -> Any:
    return sys.modules.get("numpy")


def by_type(function: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """Cache a function's results by type. (mypy does not consider types hashable, as ``functools.cache`` requires.)"""
    known: dict[Any, _T] = {}

    @functools.wraps(function)
    def ask(kind: Any) -> _T:
        try:
            return known[kind]
        except KeyError:
            return known.setdefault(kind, function(kind))

    return ask


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
    return library is not None and issubclass(kind, (library.generic, library.dtype))


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
        return bool(one.hex() == other.hex())  # 0.0 is not -0.0, and nan is nan
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
        return same_items(list(tuple.__iter__(one)), list(tuple.__iter__(other)))
    return False


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
    """How objects of some types are handled. Stateless."""

    name: str

    @abstractmethod
    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        """Return the content, detached from the object: it does not change when the object does."""

    def again(self, obj: Any, skip: frozenset[str], old: Any) -> Any:
        """Return the present content, as ``old`` itself if it is unchanged."""
        new = self.read(obj, skip)
        return old if self.same(old, new) else new

    def same(self, old: Any, new: Any) -> bool:
        return old is new or bool(old == new)

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        """Restore content returned by :meth:`read`. Raises ``TypeError`` if that is impossible."""
        raise TypeError("it cannot be put back")

    def children(self, content: Any) -> Iterator[Child]:
        return iter(())


class Opaque(Kind):
    """Objects that do not decide training (a lock, a logger, compiled code) or cannot be inspected. They are compared
    by identity alone: a replacement is detected, a change inside is not."""

    name = "opaque"

    def read(self, obj: Any, skip: frozenset[str]) -> Any:
        return None

    def write(self, obj: Any, content: Any, skip: frozenset[str] = frozenset()) -> None:
        pass


# --- attributes, regardless of what classes override


@by_type
def slots_of(kind: Any) -> dict[str, Any]:
    """Return the descriptors of attributes in ``__slots__``, by name."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__flags__ & HEAP:
            for name, member in vars(base).items():
                if type(member) is types.MemberDescriptorType and name in _declared(base):
                    found[name] = member
    return found


def _declared(kind: Any) -> set[str]:
    declared = vars(kind).get("__slots__", ())
    names = (declared,) if isinstance(declared, str) else tuple(declared)
    return {
        f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
    }


@by_type
def has_dict(kind: Any) -> bool:
    return bool(getattr(kind, "__dictoffset__", 0))


@by_type
def has_own_memory(kind: Any) -> bool:
    """Return whether instances hold more than ``__dict__`` and ``__slots__``, due to a base class written in C."""
    pointers = sum(
        type(member) is types.MemberDescriptorType and name in _declared(base)
        for base in kind.__mro__
        if base.__flags__ & HEAP
        for name, member in vars(base).items()
    )
    pointers += (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return bool(kind.__basicsize__ - object.__basicsize__ > 8 * pointers)


def dict_of(obj: Any) -> dict[str, Any] | None:
    """Return the actual ``__dict__`` of an object, or ``None`` if it has none."""
    if not has_dict(type(obj)):
        return None
    try:
        own = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    return own if isinstance(own, dict) else None


def own_of(obj: Any) -> dict[str, Any]:
    """Return a copy of all instance attributes, in ``__dict__`` and ``__slots__``."""
    own = dict_of(obj)
    found = dict(own) if own else {}
    slots = slots_of(type(obj))
    for name, member in slots.items():
        try:
            found[name] = member.__get__(obj)
        except AttributeError:
            continue  # not bound
    return found


def write_own(obj: Any, content: dict[str, Any], skip: frozenset[str] = frozenset()) -> None:
    """Replace all instance attributes by ``content``, except those in ``skip``."""
    own, slots = dict_of(obj), slots_of(type(obj))
    if own is not None:
        kept = {name: own[name] for name in own if name in skip}
        own.clear()
        own.update({name: value for name, value in content.items() if name not in slots})
        own.update(kept)
    for name, member in slots.items():
        if name in content:
            member.__set__(obj, content[name])
        elif name not in skip and name in own_of(obj):
            member.__delete__(obj)


def attribute_children(content: dict[str, Any]) -> Iterator[Child]:
    for name, value in content.items():
        if type(value) not in LEADS_NOWHERE:
            yield f".{name}", value
