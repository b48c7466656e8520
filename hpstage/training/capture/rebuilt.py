"""Immutable objects of Python and of libraries that can be made again from their parts, which a state holds.

``re.Match`` is not among them: only a search makes one, and a state could name a search that never ends.
"""

from __future__ import annotations

import functools
import operator
import types
import typing
from collections.abc import Callable
from typing import Any

from hpstage.errors import StateError
from hpstage.training.capture.kind import numpy, torch
from hpstage.training.capture.survey import Survey
from hpstage.training.code.attributes import own_of

Parts = tuple[Any, ...]


def parts_of(value: object, base: Survey) -> tuple[str, Parts] | None:
    """Return the name of an object's kind, and the parts that it was made of; ``None`` for an object of no such kind,
    and for one that would differ if it were made again."""
    if type(value) is operator.methodcaller:
        name, arguments, keywords = _parts_of_call(value)
        return (_CALLER, (name, arguments, keywords)) if _may_be_called(name, base) else None
    for name, (is_one, parts, _) in _KINDS.items():
        if is_one(value):
            found = parts(value)
            return None if found is None else (name, found)
    return None


def made_of(name: str, parts: list[Any], base: Survey) -> Any:
    """Make an object again from its parts. Raises :class:`StateError` if no such object has these parts."""
    if name == _CALLER:
        method, arguments, keywords = parts
        if not _may_be_called(method, base):
            raise StateError(f"the state holds a methodcaller of {method!r}, which this code does not name")
        return operator.methodcaller(method, *arguments, **dict(keywords))
    if name not in _KINDS:
        raise StateError(f"the state holds a {name!r}, which this version of hpstage does not know")
    return _KINDS[name][2](*parts)


# --- operators


def _names_of(value: Any) -> Parts | None:
    names: Parts = value.__reduce__()[1]
    return names if all(map(_is_public, names)) else None


def _attributes(*names: Any) -> Any:
    if not all(map(_is_public, names)):
        raise StateError(f"the state holds an attrgetter of {names}, which no state may hold")
    return operator.attrgetter(*names)


_CALLER = "methodcaller"


def _parts_of_call(value: Any) -> tuple[str, Parts, Parts]:
    """Return the name of a method, its positional arguments, and its keyword arguments."""
    made_by, parts = value.__reduce__()
    if made_by is operator.methodcaller:
        return parts[0], parts[1:], ()
    return made_by.args[0], parts, tuple(made_by.keywords.items())


def _may_be_called(name: str, base: Survey) -> bool:
    """Return whether the user's code names a method: a state provides the arguments, as for a function of the user's,
    but must not be able to choose another method, such as one that writes a file."""
    return _is_public(name) and name in base.mentioned


def _is_public(name: str) -> bool:
    """Return whether no part of a dotted name begins with ``_``: by Python's own names, any object could be reached."""
    return not any(part.startswith("_") for part in name.split("."))


# --- aliases of types


def _parts_of_typing(value: Any) -> Parts | None:
    """Return the name of the form in ``typing`` and its argument in brackets, if any; ``None`` if
    it cannot be made again."""
    reduced = value.__reduce__()
    if type(reduced) is str:
        return (reduced,)
    form, inside = reduced[1]
    if not _is_of_typing(form):  # a class of the user's
        return None
    made = _of_typing(form._name, inside)
    return (form._name, inside) if type(made) is type(value) and made == value else None


def _of_typing(name: str, *inside: Any) -> Any:
    form: Any = vars(typing).get(name)
    if not _is_of_typing(form):
        raise StateError(f"the state names typing.{name}, which is not available here")
    return form[inside[0]] if inside else form


def _is_of_typing(value: object) -> bool:
    return type(value).__module__ == "typing" and type(value).__name__ in _FORMS


_FORMS = (
    *("_GenericAlias", "_UnionGenericAlias", "_LiteralGenericAlias", "_SpecialGenericAlias", "_SpecialForm"),
    *("_CallableGenericAlias", "_CallableType", "_TupleType"),
)


def _parts_of_union(value: Any) -> Parts | None:
    parts: Parts = value.__args__
    return parts if all(map(_may_be_joined, parts)) else None


def _union(*parts: Any) -> Any:
    if not all(map(_may_be_joined, parts)):
        raise StateError(f"the state holds a union of {parts}, which no state may hold")
    return functools.reduce(operator.or_, parts)


def _may_be_joined(part: object) -> bool:
    """Return whether the operator ``|`` on this part of a union is Python's own."""
    return type(part) in (type, types.GenericAlias)


# --- limits of numbers


def _parts_of_limits(value: Any) -> Parts | None:
    """Return the dtype of a ``finfo`` or ``iinfo`` of NumPy; ``None`` if it has been given other attributes."""
    own = own_of(value)
    other = type(value)("f2" if own["dtype"].str[1:] != "f2" else "f4") if isinstance(value, numpy().finfo) else None
    known = {*own_of(numpy().iinfo("i1") if other is None else other), *vars(type(value))}
    return None if own.keys() - known else (own["dtype"].str,)


_KINDS: dict[str, tuple[Callable[[Any], bool], Callable[[Any], Parts | None], Callable[..., Any]]] = {
    "itemgetter": (
        lambda value: type(value) is operator.itemgetter,
        lambda value: value.__reduce__()[1],
        operator.itemgetter,
    ),
    "attrgetter": (lambda value: type(value) is operator.attrgetter, _names_of, _attributes),
    "alias": (
        lambda value: type(value) is types.GenericAlias,
        lambda value: None if value.__unpacked__ else (value.__origin__, value.__args__),
        types.GenericAlias,
    ),
    "union": (lambda value: type(value) is types.UnionType, _parts_of_union, _union),
    "typing": (_is_of_typing, _parts_of_typing, _of_typing),
    "torch.finfo": (
        lambda value: torch() is not None and type(value) is torch().finfo,
        lambda value: (getattr(torch(), value.dtype),),
        lambda dtype: torch().finfo(dtype),
    ),
    "torch.iinfo": (
        lambda value: torch() is not None and type(value) is torch().iinfo,
        lambda value: (getattr(torch(), value.dtype),),
        lambda dtype: torch().iinfo(dtype),
    ),
    "numpy.finfo": (
        lambda value: type(value) is numpy().finfo,
        _parts_of_limits,
        lambda dtype: numpy().finfo(numpy().dtype(dtype)),
    ),
    "numpy.iinfo": (
        lambda value: type(value) is numpy().iinfo,
        _parts_of_limits,
        lambda dtype: numpy().iinfo(numpy().dtype(dtype)),
    ),
}
"""By name: a test whether an object is of this kind, and functions that return its parts and make it again."""
