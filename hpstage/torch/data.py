"""Batches of a map-style data set: hpstage decides the order, the user's code provides samples and collation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate

from hpstage.errors import UsageError
from hpstage.training.sample_order import SampleOrder


class Batches:
    """Fetches batches on a device.

    Args:
        dataset: map-style, with ``__len__``.
        collate: makes a batch from samples; ``None`` for torch's ``default_collate``. In that case, TensorDatasets and
            Subsets of them are indexed at once, with the same result.
        device: where tensors of the batch are moved to.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None, device: torch.device) -> None:
        stream = isinstance(dataset, IterableDataset)
        if stream or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UsageError(
                f"dataset() returned {type(dataset).__name__}; it must return a map-style data set, with __len__ and "
                "__getitem__: a stream cannot be forked at any step"
            )
        self.dataset = dataset
        self._collate = collate or default_collate
        self._device = device
        self._tensors: tuple[torch.Tensor, ...] | None = None
        self._index: torch.Tensor | None = None  # indices of a Subset
        if collate is None:
            self._tensors, self._index = _tensors(dataset)
        self.order = SampleOrder(len(dataset))

    def take(self, seed: int, position: int, count: int) -> Any:
        """Return the batch of ``count`` samples from ``position`` (samples consumed so far)."""
        indices = self.order.take(seed, position, count)
        if self._tensors is not None:
            chosen = torch.from_numpy(indices)
            if self._index is not None:
                chosen = self._index[chosen]
            batch: Any = [_rows(tensor, chosen) for tensor in self._tensors]
        elif hasattr(self.dataset, "__getitems__"):
            batch = self._collate(self.dataset.__getitems__(indices.tolist()))
        else:
            batch = self._collate([self.dataset[index] for index in indices.tolist()])
        return batch if self._device.type == "cpu" else moved(batch, self._device)


def _tensors(dataset: Any) -> tuple[tuple[torch.Tensor, ...] | None, torch.Tensor | None]:
    """Return the tensors to index and a Subset's indices. Types must match exactly: a subclass may do anything."""
    if type(dataset) is TensorDataset:
        return dataset.tensors, None
    if type(dataset) is Subset and type(dataset.dataset) is TensorDataset:
        return dataset.dataset.tensors, torch.as_tensor(dataset.indices, dtype=torch.int64)
    return None, None


def _rows(tensor: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    # index_select is twice as fast as indexing.
    return tensor.index_select(0, chosen if tensor.device.type == "cpu" else chosen.to(tensor.device))


def moved(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with its tensors on ``device``, including those in dicts, lists and (named) tuples."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device) for value in batch)
    return batch
