"""Makes batches from a data set: fetches samples with seeded generators, collates them, and moves them to a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate

from hpstage.torch.loading.mixture import Mixture
from hpstage.training.randomness import Purpose, rekey
from hpstage.training.sample_order import Indices

Collate = Callable[[list[Any]], Any]


class PlainBatches:
    """Base class of batches. Its methods suit batches that the training process makes, as a function of the number of
    samples consumed; subclasses with processes, or with a position of their own, override them."""

    batch_size: int | None = None
    draws = True

    def see_size(self, size: int) -> None:
        """Warn, once, if the batch size is larger than the data set."""

    def position(self) -> Any:
        """Return the position that a state must hold besides the number of samples consumed; ``None`` for none."""

    def go_to(self, position: Any) -> None:
        """Continue from what :meth:`position` returned; ``None``: from the beginning."""

    def settle(self) -> None:
        """Prepare for training from another state: call it after a setup, and after a state was loaded."""

    def check(self) -> None:
        """Raise :class:`~hpstage.errors.StateError` if training has changed an object without effect on the batches
        that follow."""

    def close(self) -> None:
        """End the processes that load, if any; they are restarted when needed. Idempotent."""


class Samples:
    """Makes batches. The random numbers that a sample draws from the global generators are a function of (seed,
    position).

    A data set with ``__getitems__`` makes a batch in one call, so that its random numbers are a function of the seed,
    the position of the first sample, and the batch size.

    Args:
        dataset: a map-style data set.
        collate: makes a batch from samples; ``None`` for torch's ``default_collate``.

    Attributes:
        draws: whether the user's code makes samples or batches, which may draw random numbers.
    """

    def __init__(self, dataset: Any, collate: Collate | None) -> None:
        self.dataset = dataset
        self.collate: Collate = collate or default_collate
        self._makes = not holds(dataset)
        self._own_collate = self.collate is not default_collate
        self._at_once = makes_batches(dataset)
        self.draws = self._makes or self._own_collate

    def load(self, seed: int, start: int, indices: Indices, is_wanted: Callable[[], bool] | None = None) -> Any:
        """Return the batch of the samples at ``indices``; the first of them has the position ``start``.

        It seeds the global generators; the caller restores them (``torch/data.py``). If ``is_wanted``, which is called
        before each sample, returns ``False``, the result is ``None``.
        """
        samples = self.made(seed, start, indices.tolist(), is_wanted)
        if samples is None:
            return None
        if self._own_collate:
            rekey(seed, start, Purpose.COLLATE)
        return self.collate(samples)

    def made(
        self, seed: int, start: int, indices: list[int], is_wanted: Callable[[], bool] | None = None
    ) -> list[Any] | None:
        """Return the samples at ``indices``; ``None`` if ``is_wanted`` returns ``False`` before one of them."""
        if self._at_once:
            if self._makes:
                rekey(seed, start, Purpose.SAMPLE)
            at_once: list[Any] = self.dataset.__getitems__(indices)
            return at_once
        samples = []
        for position, index in enumerate(indices, start):
            if is_wanted is not None and not is_wanted():
                return None
            if self._makes:
                rekey(seed, position, Purpose.SAMPLE)
            samples.append(self.dataset[index])
        return samples


def holds(dataset: Any) -> bool:
    """Return whether a data set only holds samples and makes none. Types must match exactly, since a subclass may do
    anything."""
    if type(dataset) is Subset:
        return holds(dataset.dataset)
    if type(dataset) in (ConcatDataset, Mixture):
        return all(map(holds, dataset.datasets))
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return all(map(holds, parts.values() if isinstance(parts, dict) else parts))
    return type(dataset) in (TensorDataset, torch.Tensor, np.ndarray, list, tuple)


def makes_batches(dataset: Any) -> bool:
    """Return whether a data set makes all samples of a batch in one call. A Subset does if its data set does."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def tensors_of(dataset: Any) -> tuple[tuple[torch.Tensor, ...] | None, torch.Tensor | None]:
    """Return the tensors of a TensorDataset, or of a Subset of one with its indices; otherwise ``None``. Types must
    match exactly, since a subclass may do anything."""
    if type(dataset) is TensorDataset:
        return dataset.tensors, None
    if type(dataset) is Subset and type(dataset.dataset) is TensorDataset:
        return dataset.dataset.tensors, torch.as_tensor(dataset.indices, dtype=torch.int64)
    return None, None


def rows(tensor: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    # index_select is twice as fast as indexing.
    return tensor.index_select(0, chosen if tensor.device.type == "cpu" else chosen.to(tensor.device))


def moved(batch: Any, device: torch.device | None) -> Any:
    """Return ``batch`` with its tensors on ``device``, including those in dicts, lists and (named) tuples.

    Copying from pinned memory does not block. If ``device`` is ``None`` or the CPU, the batch is returned as it is.
    """
    return batch if device is None or device.type == "cpu" else _moved(batch, device)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(value, device) for value in batch)
    return batch
