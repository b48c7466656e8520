"""Batches: which samples of a map-style data set form the batches of each step. ``loading/`` loads them."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from hpstage.errors import StateError, UsageError
from hpstage.torch.loading.orders import Weighted
from hpstage.torch.loading.processes import Processes
from hpstage.torch.loading.samples import Collate, PlainBatches, Samples, moved, rows, tensors_of
from hpstage.torch.loading.streams import StreamBatches, is_stream
from hpstage.torch.loading.taken_over import Source, Workers, of_dataset, of_loader
from hpstage.training.randomness import generators_restored

logger = logging.getLogger("hpstage")


class Batches(PlainBatches):
    """The batches of a map-style data set, on a device. They are bit-identical whether this process makes them or other
    processes load them ahead.

    Args:
        source: the data set and its settings. With torch's ``default_collate``, this process makes a batch of a
            TensorDataset, or of a Subset of one, by indexing its tensors once, with the same result.
        device: the device that tensors of the batch are moved to; ``None``: they stay where they are.
    """

    def __init__(self, source: Source, device: torch.device | None) -> None:
        self.source = source
        self.dataset = source.dataset
        self.cut = source.cut
        self.samples = Samples(source.dataset, source.collate)
        self.batch_size, self.options, self.draws = source.batch_size, source.options, self.samples.draws
        self._order = source.order
        self._device = device
        self._tensors: tuple[torch.Tensor, ...] | None = None
        self._index: torch.Tensor | None = None  # indices of a Subset
        if source.collate is None:
            self._tensors, self._index = tensors_of(self.dataset)
        self.processes: Processes | None = None
        if source.workers.count and self._tensors is None and _may_start_processes():
            self.processes = Processes(self.samples, self._order, self.cut, source.workers)
        self._warned = False

    def take(self, seed: int, position: int, count: int, size: int | None = None) -> Any:
        """Return the batch of ``count`` samples from ``position`` (the number of samples consumed before).

        The global generators stay as they were. Processes load ahead the batches that follow, of size ``size``.
        """
        if self._tensors is not None:
            chosen = torch.from_numpy(self._order.take(seed, position, count))
            if self._index is not None:
                chosen = self._index[chosen]
            batch: Any = [rows(tensor, chosen) for tensor in self._tensors]
        elif self.processes is not None:
            batch = self.processes.take(seed, position, count, size or count)
        elif self.samples.draws:
            with generators_restored():
                batch = self.samples.load(seed, position, self._order.take(seed, position, count))
        else:
            batch = self.samples.load(seed, position, self._order.take(seed, position, count))
        return moved(batch, self._device)

    def of_step(self, seed: int, position: int, size: int, *, by_epoch: bool) -> Iterator[tuple[Any, int]]:
        """Yield the batches of a step (one batch, or the rest of the epoch), each with the number of samples consumed
        up to its end."""
        self._refuse_outdated()
        end = self.cut.end_of_epoch(position)
        while True:
            start, count = self.cut.batch(position, size)
            if by_epoch and start >= end:
                return
            position = start + count
            if by_epoch and self.cut.batch(position, size)[0] >= end:
                position = end  # the rest, if any, is dropped
            yield self.take(seed, start, count, size), position
            if not by_epoch:
                return

    def _refuse_outdated(self, *, within: bool = False) -> None:
        if (name := self.source.outdated(within=within)) is not None:
            raise StateError(
                f"training has given {name} another value, which has no effect: hpstage read {name} when the data were "
                f"opened, but a fork would open them with the new value. Keep the old value, or change a tensor in "
                f"place; a training function can also make a new DataLoader for each epoch"
            )

    def see_size(self, size: int) -> None:
        if size > self.cut.population and not self._warned:
            self._warned = True
            logger.warning(
                "The batch size is %d, but an epoch has %d samples: %s.",
                size,
                self.cut.population,
                "each batch has samples of several epochs" if self.cut.end == "full" else "each batch is a whole epoch",
            )

    def settle(self) -> None:
        if self.processes is not None:
            self.processes.settle()

    def check(self) -> None:
        self._refuse_outdated(within=True)
        order = self._order
        if isinstance(order, Weighted) and order.is_outdated(ahead=self.processes is not None):
            raise StateError(
                "training has changed the weights of a WeightedRandomSampler within an epoch. The order of the epoch "
                "was drawn before, but a fork would draw it again. Change the weights after the last batch of an "
                "epoch; if processes load ahead, give the DataLoader num_workers=0"
            )
        if self.processes is not None:
            self.processes.check()

    def close(self) -> None:
        if self.processes is not None:
            self.processes.close()


def _may_start_processes() -> bool:
    if not multiprocessing.current_process().daemon:
        return True
    logger.warning("Data are loaded in the training process, which is daemonic and cannot start other processes.")
    return False


def _overridden(kind: type) -> list[str]:
    """Return the names that a subclass of DataLoader overrides, except ``__init__``, which decides no batch."""
    added = {name for base in kind.__mro__[: kind.__mro__.index(DataLoader)] for name in vars(base)}
    return sorted(added.intersection(dir(DataLoader)) - vars(_OverridesNothing).keys() - {"__init__"})


class _OverridesNothing(DataLoader[Any]):
    """A class with the names that Python defines in every class, and no others."""

    annotated: int


def batches_of(
    data: Any,
    collate: Collate | None,
    device: torch.device | None,
    workers: Workers = Workers(),  # noqa: B008  # immutable
    *,
    by_epoch: bool = False,
    who: str = "dataset()",
) -> Batches | StreamBatches:
    """Return the batches of a data set, a DataLoader or a stream.

    Args:
        data: the data set, DataLoader or stream.
        collate: makes a batch from samples; ``None`` for torch's ``default_collate``.
        device: see :class:`Batches`.
        workers: the processes that load ahead, unless a DataLoader states them.
        by_epoch: whether the last batch of an epoch may be short, unless a DataLoader decides it.
        who: what returned ``data``, for errors.

    Raises:
        UsageError: batches cannot be addressed by their position, or a setting of the DataLoader is not supported.
    """
    if isinstance(data, DataLoader):
        if (overridden := _overridden(type(data))) and not type(data).__module__.startswith("torchdata."):
            raise UsageError(
                f"{who} returned a {type(data).__name__}, a subclass of DataLoader, which may make batches "
                f"differently: it overrides {', '.join(overridden)}. Return a plain DataLoader, or its data set"
            )
        if collate is not None:
            raise UsageError(
                f"{who} returned a DataLoader, but collate() is defined as well: give the DataLoader its collate_fn, "
                f"and leave out collate()"
            )
    if is_stream(data):
        return StreamBatches(data, collate, device, workers.count, by_epoch=by_epoch, who=who)
    if isinstance(data, DataLoader):
        source = of_loader(data, workers)
    else:
        source = of_dataset(data, collate, workers, by_epoch=by_epoch)
    return Batches(source, device)
