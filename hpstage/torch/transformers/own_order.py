"""Batches in the order of a Trainer's own loader, as a function of (seed, epoch): every step is addressable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer, set_seed

from hpstage.errors import UsageError
from hpstage.torch.loading.samples import PlainBatches
from hpstage.torch.loading.streams import is_stream
from hpstage.training.randomness import Purpose, generators_restored, rekey

FIXED = frozenset(("per_device_train_batch_size", "gradient_accumulation_steps", "seed"))
"""Fields that a loader is made by: here they hold for a whole trial."""


def has_own_order(trainer: Trainer) -> bool:
    """Return whether a Trainer orders samples in its own way: by a method or by its arguments."""
    return orders_itself(type(trainer), {name: getattr(trainer.args, name) for name in USUAL})


def orders_itself(kind: Any, fields: Mapping[str, Any]) -> bool:
    """Return whether a Trainer orders samples in its own way.

    Args:
        kind: its class, or the function that makes it.
        fields: fields of its arguments, at least those of ``USUAL``.
    """
    own = any(getattr(kind, name, getattr(Trainer, name)) is not getattr(Trainer, name) for name in _DECIDE)
    return own or any(fields[name] != value for name, value in USUAL.items())


USUAL = {"train_sampling_strategy": "random", "dataloader_drop_last": False}
"""Fields that decide the order, and the value with which the order is hpstage's."""


_DECIDE = ("get_train_dataloader", "_get_train_sampler")


def own_loader(trainer: Trainer) -> DataLoader[Any]:
    """Return a new loader of a Trainer, which is left as it was.

    Raises:
        UsageError: its batches cannot be addressed by their number.
    """
    attributes, prepared = dict(vars(trainer)), trainer.accelerator._dataloaders
    before = len(prepared)
    with generators_restored():
        set_seed(trainer.args.seed)  # as Trainer does; accelerate's sampler goes by the seed of torch's generator
        loader = trainer.get_train_dataloader()
    del prepared[before:]
    vars(trainer).clear()
    vars(trainer).update(attributes)
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None or is_stream(loader):
        what = f"{type(loader).__name__} of {type(getattr(loader, 'dataset', None)).__name__}"
        raise UsageError(
            f"{type(trainer).__name__}.get_train_dataloader() returned a {what}: a search needs a DataLoader of a "
            f"map-style data set, with __len__ and __getitem__, so that any batch can be addressed by its number"
        )
    return loader


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """The batches of a step, and the number of epochs trained after it, with its fraction."""

    batches: list[Any]
    epoch: float


class _Numbers:
    """A data set of the numbers of samples."""

    def __getitem__(self, number: Any) -> Any:
        return number


class OwnBatches(PlainBatches):
    """The batches of a Trainer's own loader; a position is the number of batches consumed.

    Args:
        make: returns a new loader.
        accumulated: number of batches of a step; at the end of an epoch there may be fewer, as under Trainer.
    """

    def __init__(self, make: Callable[[], DataLoader[Any]], accumulated: int) -> None:
        self._make = make
        self._accumulated = accumulated
        self._begin()

    def _begin(self) -> None:
        self._loader = self._make()
        self._epoch, self._before = -1, 0
        self._batches: list[list[int]] = []  # samples of the batches of the present epoch

    def of_step(self, seed: int, position: int, size: int, *, by_epoch: bool) -> Iterator[tuple[Made, int]]:
        """Yield the batches of a step with the number of batches consumed after each: of one, or of an epoch."""
        if position < self._before:
            self._begin()
        while position >= self._before + len(self._batches):
            self._next_epoch(seed)
        end, dataset, collate = self._before + len(self._batches), self._loader.dataset, self._loader.collate_fn
        while position < end:
            start = position - self._before
            chosen = self._batches[start : start + self._accumulated]
            position += len(chosen)
            epoch = self._epoch + (position - self._before) / len(self._batches)
            yield Made([collate(_fetched(dataset, numbers)) for numbers in chosen], epoch), position
            if not by_epoch:
                return

    def _next_epoch(self, seed: int) -> None:
        """Make the sampler draw the order of the next epoch. It may continue a generator, so epochs are drawn in
        sequence."""
        loader = self._loader
        self._before += len(self._batches)
        self._epoch += 1
        parts: tuple[Any, ...] = (loader, getattr(loader.batch_sampler, "batch_sampler", None))
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._epoch)
        with generators_restored():
            rekey(seed, self._epoch, Purpose.DATA)
            numbers: DataLoader[Any] = DataLoader(
                _Numbers(),  # type: ignore[arg-type]
                batch_sampler=loader.batch_sampler,
                collate_fn=list,
                generator=loader.generator,  # from which a loader draws, too
            )
            self._batches = list(numbers)
        if len(self._batches) % self._accumulated and len(self._batches) != len(loader):
            raise UsageError(
                f"epoch {self._epoch} has {len(self._batches)} batches, its loader counts {len(loader)}, and "
                f"{self._accumulated} are accumulated: Trainer would leave gradients over to the next epoch. Set "
                f"gradient_accumulation_steps=1"
            )
        if not self._batches:
            raise UsageError(f"the Trainer's own loader has no batch in epoch {self._epoch}: lower the batch size")


def _fetched(dataset: Any, numbers: list[int]) -> list[Any]:
    together = getattr(dataset, "__getitems__", None)
    return together(numbers) if together is not None else [dataset[number] for number in numbers]
