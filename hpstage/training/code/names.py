"""Names and strings in the bytecode of functions; and docstrings and annotations, which other code may read."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import pairwise

from hpstage.training.code.bytecode import inner, instructions_of

_REMEMBERED = 4096
"""Size of caches of disassembled functions: surveys meet the same ones again and again."""


@functools.lru_cache(_REMEMBERED)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return names that a code object, or one nested in it, loads or stores other than local variables."""
    return tuple(name for part in inner(code) for name in part.co_names)


def texts_in(code: types.CodeType) -> Iterator[str]:
    """Yield string literals in a code object or one nested in it."""
    return (constant for part in inner(code) for constant in part.co_consts if isinstance(constant, str))


def texts_among(constants: object) -> Iterator[str]:
    """Yield strings among constants, including those in tuples and sets."""
    if isinstance(constants, str):
        yield constants
    elif isinstance(constants, tuple | frozenset):
        for constant in constants:
            yield from texts_among(constant)


@functools.lru_cache(_REMEMBERED)
def stored_in(code: types.CodeType) -> tuple[str, ...]:
    """Return names that a code object, or one nested in it, declares global and binds."""
    return _arguments(code, "STORE_GLOBAL")


@functools.lru_cache(_REMEMBERED)
def attributes_stored_in(code: types.CodeType) -> tuple[str, ...]:
    """Return names of attributes that a code object, or one nested in it, sets, including by ``setattr``."""
    texts: tuple[str, ...] = ()
    if not {"setattr", "delattr", "vars", "__dict__"}.isdisjoint(names_in(code)):
        texts = tuple(text for text in texts_in(code) if text.isidentifier())
    return _arguments(code, "STORE_ATTR") + texts


@functools.lru_cache(_REMEMBERED)
def holders_stored_to(code: types.CodeType) -> frozenset[str]:
    """Return the last names of the objects whose attributes a code object, or one nested in it, sets: ``c`` for
    ``a.c.d = 1``."""
    return frozenset(
        holder.argval
        for part in inner(code)
        for holder, item in pairwise(instructions_of(part))
        if item.opname == "STORE_ATTR" and holder.opname in ("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME")
    )


@functools.lru_cache(_REMEMBERED)
def attributes_read_in(code: types.CodeType) -> frozenset[str]:
    """Return names of attributes that a code object, or one nested in it, reads, including by ``getattr``."""
    texts: tuple[str, ...] = ()
    if not {"getattr", "vars", "__dict__"}.isdisjoint(names_in(code)):
        texts = tuple(text for text in texts_in(code) if text.isidentifier())
    return frozenset((*_arguments(code, "LOAD_ATTR"), *_arguments(code, "LOAD_METHOD"), *texts))


def _arguments(code: types.CodeType, operation: str) -> tuple[str, ...]:
    return tuple(item.argval for part in inner(code) for item in instructions_of(part) if item.opname == operation)


_OF_TEXTS = frozenset(("__doc__", "getdoc"))
_OF_ANNOTATIONS = frozenset(
    (
        *("__annotations__", "__dataclass_fields__", "__metadata__", "__signature__", "fields", "get_annotations"),
        *("get_type_hints", "model_fields", "signature"),
    )
)
READERS = _OF_TEXTS | _OF_ANNOTATIONS
"""Names by which code reads docstrings and annotations."""


def notes(code: type | types.FunctionType, readers: Collection[str]) -> Iterator[object]:
    """Yield the docstring and the annotations of a class or function, as far as code may read them that names
    ``readers``."""
    if not _OF_TEXTS.isdisjoint(readers):
        yield vars(code).get("__doc__") if isinstance(code, type) else code.__doc__
    if not _OF_ANNOTATIONS.isdisjoint(readers):
        with suppress(Exception):  # annotations evaluated late may name missing objects
            yield inspect.get_annotations(code)
        fields = vars(code).get("__dataclass_fields__", {})
        yield {name: dict(field.metadata) for name, field in fields.items()}
