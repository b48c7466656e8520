"""Reads and writes the attributes of objects without calling any code of their classes, even if it overrides access."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from hpstage.training.code.owner import HEAP, by_type

COMPILED = "_torchdynamo_wrapper_id"
"""An attribute in which ``torch.compile`` stores an address."""


@by_type
def slots_of(kind: Any) -> dict[str, Any]:
    """Return the descriptors of attributes in ``__slots__``, by name."""
    return dict(_slots(kind))


def _slots(kind: Any) -> Iterator[tuple[str, Any]]:
    for base in reversed(kind.__mro__):
        if base.__flags__ & HEAP:
            for name, member in vars(base).items():
                if type(member) is types.MemberDescriptorType and name in _declared(base):
                    yield name, member


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
    return _holds_more(kind, object)


@by_type
def container_of(kind: Any) -> Any:
    """Return ``list`` or ``dict`` if a class derives from it and its instances hold only items, ``__dict__`` and
    ``__slots__``; ``None`` for other classes."""
    for container in (list, dict):
        if issubclass(kind, container):
            return None if kind is container or _holds_more(kind, container) else container
    return None


def _holds_more(kind: Any, than: type) -> bool:
    pointers = len([*_slots(kind)]) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return bool(kind.__basicsize__ - than.__basicsize__ > 8 * pointers)


def dict_of(obj: Any) -> dict[str, Any] | None:
    """Return the actual ``__dict__`` of an object, or ``None`` if it has none."""
    if not has_dict(type(obj)):
        return None
    try:
        own = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    return own if isinstance(own, dict) else None


@by_type
def _descriptor(kind: Any) -> Any:
    """Return the descriptor by which Python reads and sets the ``__dict__`` of instances; ``None`` if there is none, or
    if a class computes it."""
    if not has_dict(kind):
        return None
    found = next((vars(base)["__dict__"] for base in kind.__mro__ if "__dict__" in vars(base)), None)
    return found if type(found) is types.GetSetDescriptorType else None


def attached_dict(obj: Any) -> dict[str, Any] | None:
    """Return the actual ``__dict__`` of an object if another one can be attached to it, else ``None``."""
    return dict_of(obj) if _descriptor(type(obj)) is not None else None


def attach_dict(obj: Any, own: dict[str, Any] | None) -> None:
    """Set the ``__dict__`` of an object back to the dict that :func:`attached_dict` has returned."""
    if own is not None and attached_dict(obj) is not own:
        _descriptor(type(obj)).__set__(obj, own)


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
