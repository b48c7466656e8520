"""Cutting a batch into micro-batches, one for each virtual node."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from hpstage.errors import UsageError

_PLAIN = (str, bytes, int, float, bool, type(None))


def cut(batch: Any, parts: int, count: int | None = None) -> list[Any]:
    """Return ``parts`` micro-batches of equal length, in order.

    Tensors are cut along their first dimension, lists and tuples of plain values by their items. What a batch nests
    them in (dicts, lists, tuples, named tuples) is made again for each part.

    Args:
        batch: the batch, as collated.
        count: the number of its samples; ``None``: the length of its first tensor.

    Raises:
        UsageError: ``parts`` does not divide the batch, or something in it cannot be cut. The message names it.
    """
    if count is None:
        tensors = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
        count = next(map(len, tensors), None)
    if count is None:
        raise UsageError("the batch holds no tensor with a dimension, so that virtual nodes cannot share it")
    if count % parts:
        raise UsageError(
            f"a batch of {count} samples cannot be cut into {parts} virtual nodes: let each batch have a multiple of "
            f"{parts}; a short one at the end of an epoch or a pass is left out by a DataLoader with drop_last=True"
        )
    size = count // parts
    return [_part(batch, slice(node * size, (node + 1) * size), count, "batch") for node in range(parts)]


def _part(value: Any, rows: slice, count: int, path: str) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if not value.dim() or len(value) != count:
            raise UsageError(
                f"{path} is a tensor of shape {tuple(value.shape)} in a batch of {count} samples, so that virtual "
                f"nodes cannot share it: let each tensor of a batch have its samples in the first dimension, and keep "
                f"what is the same for all batches on the trainable or in the model"
            )
        return value[rows]
    if value is None:
        return None
    if kind is dict:
        return {key: _part(item, rows, count, f"{path}[{key!r}]") for key, item in value.items()}
    if kind in (list, tuple) and len(value) == count and all(type(item) in _PLAIN for item in value):
        return value[rows]
    if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(kind, "_make")):
        items = [_part(item, rows, count, f"{path}[{index}]") for index, item in enumerate(value)]
        return kind(items) if kind in (list, tuple) else kind._make(items)
    raise UsageError(
        f"{path} is a {kind.__qualname__}, which virtual nodes cannot share: let collate() make batches of tensors, "
        f"and of dicts, lists and tuples of them"
    )
