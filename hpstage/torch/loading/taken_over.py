"""The settings of the user's data set or DataLoader. A sampler is replaced by an order of the same kind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from hpstage.errors import UsageError
from hpstage.torch.loading.mixture import mixture_of
from hpstage.torch.loading.orders import Cut, order_of
from hpstage.torch.loading.samples import Collate
from hpstage.training.sample_order import SampleOrder

logger = logging.getLogger("hpstage")


@dataclass(frozen=True, slots=True)
class Workers:
    """The processes that load, by torch's parameters of a DataLoader. Batches have the same bits with any of them.

    Attributes:
        count: ``num_workers``; 0: this process loads.
        prefetch_factor: number of batches that each process loads ahead.
        pin_memory: whether batches are put into pinned memory, from which they are copied while the GPU computes.
        timeout: seconds to wait for a batch; 0: no limit.
        init: ``worker_init_fn``, called in each process with its number.
        context: multiprocessing context; ``None``: processes are forked if the system allows it.
        prepare: called in each process before anything is loaded.
        owner: the trainable. Training may change it, although processes have an unchanged copy.
        stateless: paths of other objects that training may change in the same way.
    """

    count: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False
    timeout: float = 0
    init: Callable[[int], None] | None = None
    context: Any = None
    prepare: Callable[[], None] | None = None
    owner: object = None
    stateless: Collection[str] = ()

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 0:
            raise UsageError(f"num_workers is {self.count!r}; it must be a whole number, 0 or more")
        if type(self.prefetch_factor) is not int or self.prefetch_factor < 1:
            raise UsageError(f"prefetch_factor is {self.prefetch_factor!r}; it must be a whole number of at least 1")


@dataclass(frozen=True, slots=True)
class Taken:
    """An attribute of a user's object with the ``value`` that was read from it, and the ``items`` of a list then."""

    owner: Any
    name: str
    value: Any
    items: tuple[Any, ...] | None

    @staticmethod
    def of(owner: Any, name: str) -> Taken:
        value: Any = getattr(owner, name)
        return Taken(owner, name, value, tuple(value) if type(value) is list else None)


@dataclass(frozen=True, slots=True)
class Source:
    """A data set and the settings with which batches are made from it.

    Attributes:
        dataset: a map-style data set.
        collate: makes a batch from samples; ``None`` for torch's ``default_collate``.
        order: the order of samples.
        cut: how the order is cut into batches.
        workers: the processes that load.
        batch_size: size of batches unless a hyperparameter or an attribute states it.
        options: the settings that decide batches besides the data set, by name.
        taken: the attributes of the user's objects from which all of this was read. Assigning them later has no effect.
    """

    dataset: Any
    collate: Collate | None
    order: SampleOrder
    cut: Cut
    workers: Workers = Workers()
    batch_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    taken: tuple[Taken, ...] = ()

    def outdated(self, *, within: bool = False) -> str | None:
        """Return the name of an attribute in ``taken`` that has another value now; ``None`` if there is none.

        Args:
            within: whether to compare the items of lists, too.
        """
        for one in self.taken:
            now = getattr(one.owner, one.name, None)
            same = now is one.value or (isinstance(now, bool | int) and now == one.value)
            if not same or (within and one.items is not None and one.items != tuple(now or ())):
                return f"{type(one.owner).__name__}.{one.name}"
        return None


def of_dataset(dataset: Any, collate: Collate | None, workers: Workers, *, by_epoch: bool = False) -> Source:
    """Return the source of a map-style data set, shuffled. All batches are full; ``by_epoch``: the last batch of an
    epoch may be short."""
    order, options = SampleOrder(len(dataset)), {}
    if (mixture := mixture_of(dataset)) is not None:
        order, options = mixture.order(), {"order": "mixture", "sources": mixture.names}
    cut = Cut(order.population, "short" if by_epoch else "full")
    return Source(dataset, collate, order, cut, workers, options=options, taken=tuple(_taken(dataset)))


def _taken(dataset: Any, loader: DataLoader[Any] | None = None) -> Iterator[Taken]:
    if type(dataset) is Subset:
        yield Taken.of(dataset, "indices")
        dataset = dataset.dataset
    if type(dataset) is TensorDataset:
        yield Taken.of(dataset, "tensors")
    if loader is not None:
        yield Taken.of(loader, "collate_fn")
        names = ("weights", "indices", "num_samples", "_num_samples", "replacement")
        yield from (Taken.of(loader.sampler, name) for name in names if name in vars(loader.sampler))


def of_loader(loader: DataLoader[Any], workers: Workers) -> Source:
    """Return the source that corresponds to a DataLoader of a map-style data set. The DataLoader's settings replace
    those of ``workers``.

    Raises:
        UsageError: a setting of the DataLoader is not supported. The message names it.
    """
    if loader.batch_size is None:
        if loader.batch_sampler is None:
            raise UsageError(
                "the DataLoader has batch_size=None, so the data set makes whole batches. Let the data set make "
                "samples, and give the DataLoader a batch_size"
            )
        raise UsageError(
            f"the DataLoader has its own batch_sampler, a {type(loader.batch_sampler).__name__}, whose batches hpstage "
            f"cannot make a function of seed and position, as they must be for training to be forked at any step. Give "
            f"the DataLoader batch_size, shuffle or sampler, and drop_last instead"
        )
    mixture = mixture_of(loader.dataset, who="the DataLoader's data set")
    order, options = order_of(loader.sampler)
    if mixture is not None:
        if options != {"order": "random"}:
            raise UsageError(
                "the DataLoader's data set is a Mixture, whose weights decide the order; give the DataLoader "
                "shuffle=True, and no other sampler"
            )
        order, options = mixture.order(), {"order": "mixture", "sources": mixture.names}
    if options["order"] != "sequential" and not _noted:
        _noted.append(True)
        logger.info(
            "The DataLoader's sampler is replaced: the hyperparameter seed and the epoch decide the order of samples, "
            "instead of a generator, so that training can be forked at any step."
        )
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    options |= {"drop_last": loader.drop_last, "batch_size": loader.batch_size, "collate_fn": collate}
    workers = replace(
        workers,
        count=loader.num_workers,
        prefetch_factor=loader.prefetch_factor or 2,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        init=loader.worker_init_fn,
        context=loader.multiprocessing_context,
    )
    cut = Cut(order.population, "dropped" if loader.drop_last else "short")
    taken = tuple(_taken(loader.dataset, loader))
    return Source(loader.dataset, collate, order, cut, workers, loader.batch_size, options, taken)


_noted: list[bool] = []
"""Not empty if this process has logged that the sampler is replaced."""
