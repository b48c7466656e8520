"""Docstrings and annotations, which other code may read and let training depend on."""

from __future__ import annotations

import inspect
import types
from collections.abc import Collection, Iterator
from contextlib import suppress

_OF_TEXTS = frozenset(("__doc__", "getdoc"))
_OF_ANNOTATIONS = frozenset(
    (
        *("__annotations__", "__dataclass_fields__", "__metadata__", "__signature__", "fields", "get_annotations"),
        *("get_type_hints", "model_fields", "signature"),
    )
)
READERS = _OF_TEXTS | _OF_ANNOTATIONS
"""Names by which code reads them."""


def notes(code: type | types.FunctionType, readers: Collection[str]) -> Iterator[object]:
    """Yield what code that names ``readers`` may read of a class or function: nothing without such names."""
    if not _OF_TEXTS.isdisjoint(readers):
        yield vars(code).get("__doc__") if isinstance(code, type) else code.__doc__
    if not _OF_ANNOTATIONS.isdisjoint(readers):
        with suppress(Exception):  # evaluated late, they may name what does not exist
            yield inspect.get_annotations(code)
        fields = vars(code).get("__dataclass_fields__", {})
        yield {name: dict(field.metadata) for name, field in fields.items()}
