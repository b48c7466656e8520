"""Batches of a stream: a data set that can only be iterated over. Its position is part of the state."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from hpstage.errors import StateError, UsageError
from hpstage.torch.loading.samples import Collate, PlainBatches, moved
from hpstage.training.randomness import Purpose, generators_restored, rekey

_END = object()


def is_stream(data: Any) -> bool:
    """Return whether a data set, or the data set of a DataLoader, can only be iterated over."""
    dataset = data.dataset if isinstance(data, DataLoader) else data
    # Streams of Hugging Face have __getitem__, too, which returns columns.
    return isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"))


def _has_shuffle_buffer(part: Any) -> bool:
    """Return whether a stage of a Hugging Face stream, or a stage that it reads from, has a shuffle buffer."""
    if part is None:
        return False
    read = (getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ()))
    return type(part).__name__.startswith("BufferShuffled") or any(map(_has_shuffle_buffer, read))


class StreamBatches(PlainBatches):
    """Batches of a stream, made in this process. The random numbers drawn for a sample are a function of (seed,
    position).

    When the stream ends, another pass over it begins. Before each pass, its ``set_epoch``, if it has one, is called
    with the number of the pass.

    Args:
        data: an iterable with ``state_dict`` and ``load_state_dict`` for the position after the last sample, or a
            DataLoader of one.
        collate: makes a batch from samples; ``None`` for torch's ``default_collate``.
        device: the device that tensors of the batch are moved to; ``None``: they stay where they are.
        num_workers: must be 0.
        by_epoch: whether the last batch of a pass may be short, unless a DataLoader decides it.
        who: what returned ``data``, for errors.
    """

    def __init__(
        self,
        data: Any,
        collate: Collate | None,
        device: torch.device | None,
        num_workers: int,
        *,
        by_epoch: bool,
        who: str,
    ) -> None:
        self.options: dict[str, Any] = {"order": "stream"}
        self._end: Literal["full", "short", "dropped"] = "short" if by_epoch else "full"
        if isinstance(data, DataLoader):
            self._end = "dropped" if data.drop_last else "short"
            self.batch_size, num_workers = data.batch_size, data.num_workers
            collate = data.collate_fn if data.collate_fn is not default_collate else collate
            self.options |= {"drop_last": data.drop_last, "batch_size": data.batch_size, "collate_fn": collate}
            data = data.dataset
        name = type(data).__name__
        if not all(callable(getattr(data, part, None)) for part in ("__iter__", "state_dict", "load_state_dict")):
            raise UsageError(
                f"{who} returned {name}; it must return a map-style data set, with __len__ and __getitem__, or a "
                f"DataLoader of one: a stream cannot be forked at any step, unless it reports its position in "
                f"state_dict() and resumes from there after load_state_dict()"
            )
        if _has_shuffle_buffer(getattr(data, "_ex_iterable", None)):
            raise UsageError(
                f"{name} has a shuffle buffer, which its state_dict() leaves out, so a fork would continue with "
                f"other samples. Shuffle the data before they become a stream, "
                f"dataset.shuffle(seed=0).to_iterable_dataset(), or leave them map-style"
            )
        if num_workers:
            raise UsageError(
                f"{name} is a stream and num_workers is {num_workers}: each process would read a part of the stream, "
                f"and no state would hold the processes' positions. Set num_workers = 0, or make the data map-style"
            )
        self.dataset = data
        self._collate = collate or default_collate
        self._device = device
        self._pass = 0
        self._samples: Iterator[Any] | None = None
        self._begins_with = copy.deepcopy(data.state_dict())

    def of_step(self, seed: int, position: int, size: int, *, by_epoch: bool) -> Iterator[tuple[Any, int]]:
        """Yield the batches of a step, each with the number of samples consumed so far, its own included."""
        if by_epoch and self._samples is not None:  # a pass that was left before its end is not continued
            self._samples, self._pass = None, self._pass + 1
        while True:
            with generators_restored():
                samples, ended = self._gathered(seed, position, size)
                batch = None
                if samples:
                    rekey(seed, position, Purpose.COLLATE)
                    batch = self._collate(samples)
            position += len(samples)
            if samples:
                yield moved(batch, self._device), position
            if ended if by_epoch else samples:
                return

    def _gathered(self, seed: int, position: int, size: int) -> tuple[list[Any], bool]:
        """Return the samples of a batch, and whether the pass has ended. If it has, there may be no samples."""
        samples: list[Any] = []
        began_empty = self._samples is None
        while len(samples) < size:
            if self._samples is None:
                self._begin(self._begins_with)
            assert self._samples is not None
            rekey(seed, position + len(samples), Purpose.SAMPLE)
            sample = next(self._samples, _END)
            if sample is not _END:
                samples.append(sample)
                continue
            if began_empty and not samples:
                raise UsageError(f"{type(self.dataset).__name__} is empty: it ended without a sample")
            self._samples, self._pass = None, self._pass + 1
            if self._end == "dropped" and began_empty:
                raise UsageError(
                    f"the batch size is {size}, {type(self.dataset).__name__} ended after {len(samples)} samples, and "
                    f"the DataLoader has drop_last=True, so every batch is dropped: lower the batch size, or set "
                    f"drop_last=False"
                )
            if self._end == "dropped":
                return [], True
            if self._end == "short":
                return samples, True
            began_empty = len(samples) == 0
        return samples, False

    def _begin(self, state: Any) -> None:
        """Begin or continue a pass at the position ``state``, since the stream may be at any position."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._pass)
        self.dataset.load_state_dict(copy.deepcopy(state))
        self._samples = iter(self.dataset)

    def position(self) -> dict[str, Any] | None:
        within = self._samples is not None
        return {"passes": self._pass, "within": copy.deepcopy(self.dataset.state_dict()) if within else None}

    def go_to(self, position: dict[str, Any] | None) -> None:
        if position is not None and (type(position) is not dict or position.keys() != {"passes", "within"}):
            raise StateError("the state holds no valid position in the stream of samples")
        within = None if position is None else position["within"]
        self._pass = 0 if position is None else position["passes"]
        self._samples = None
        if within is not None:
            self._begin(within)
        else:
            self.dataset.load_state_dict(copy.deepcopy(self._begins_with))

    def first(self, count: int) -> list[Any]:
        """Return the first samples, as part of the identity of the data. Then go to the beginning."""
        self.go_to(None)
        self._begin(self._begins_with)
        assert self._samples is not None
        found: list[Any] = []
        while len(found) < count:
            rekey(0, len(found), Purpose.DATA)
            sample = next(self._samples, _END)
            if sample is _END:
                break
            found.append(sample)
        self.go_to(None)
        return found
