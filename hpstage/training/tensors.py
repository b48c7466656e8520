"""The tensors and arrays of a state, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpstage.training.capture.kind import numpy
from hpstage.training.capture.values import is_tensor


def named_tensors(state: object) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays that training has changed, by name, from a state of any style of trainable."""
    match state:
        case {"model": Mapping() as model, "values": Mapping() as values, "optimizer_class": str()}:
            yield from _tensors({f"model.{name}": value for name, value in model.items()} | dict(values))
        case {"captured": {"values": Mapping() as values}, "own": Mapping() as own}:
            yield from _tensors({**values, **own})
        case _:
            yield from _tensors(state)


def _tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays in a tree of mappings and sequences, each after its path."""
    if is_tensor(tree) or isinstance(tree, numpy().ndarray):
        yield path, tree
    elif isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for name, value in items:
            yield from _tensors(value, f"{path}.{name}" if path else str(name))
