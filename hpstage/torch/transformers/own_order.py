"""Batches in the order of a Trainer's own loader, as a function of (seed, epoch), so that training can begin at any
step."""

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
"""Fields that a loader depends on. Since a trial makes its loader once, they cannot change in a trial."""


def has_own_order(trainer: Trainer) -> bool:
    """Return whether a Trainer decides the order of samples itself, by a method or by its arguments."""
    return orders_itself(type(trainer), {name: getattr(trainer.args, name) for name in USUAL})


def orders_itself(kind: Any, fields: Mapping[str, Any]) -> bool:
    """Return whether a Trainer decides the order of samples itself.

    Args:
        kind: the class of the Trainer, or the function that makes it.
        fields: fields of its arguments, at least those of ``USUAL``.
    """
    own = any(getattr(kind, name, getattr(Trainer, name)) is not getattr(Trainer, name) for name in _DECIDE)
    return own or any(fields[name] != value for name, value in USUAL.items())


USUAL = {"train_sampling_strategy": "random", "dataloader_drop_last": False}
"""Fields that decide the order, with the values for which hpstage decides it."""


_DECIDE = ("get_train_dataloader", "_get_train_sampler")


def own_loader(trainer: Trainer) -> DataLoader[Any]:
    """Return a new training loader of a Trainer. The Trainer stays as it was.

    Raises:
        UsageError: its batches cannot be addressed by their number.
    """
    attributes, prepared = dict(vars(trainer)), trainer.accelerator._dataloaders
    before = len(prepared)
    with generators_restored():
        set_seed(trainer.args.seed)  # as Trainer does; accelerate's sampler is seeded by torch's generator
        loader = trainer.get_train_dataloader()
    del prepared[before:]
    vars(trainer).clear()
    vars(trainer).update(attributes)
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None or is_stream(loader):
        what = f"{type(loader).__name__} of {type(getattr(loader, 'dataset', None)).__name__}"
        raise UsageError(
            f"{type(trainer).__name__}.get_train_dataloader() returned a {what}. It must return a DataLoader of a "
            f"map-style data set, with __len__ and __getitem__, so that any batch can be addressed by its number"
        )
    return loader


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """The batches of a step, and the number of epochs trained after the step, a fraction included."""

    batches: list[Any]
    epoch: float


class _Numbers:
    """A data set in which each sample is its own index."""

    def __getitem__(self, number: Any) -> Any:
        return number


class OwnBatches(PlainBatches):
    """The batches of a Trainer's own loader. The position is the number of batches consumed.

    Args:
        make: returns a new loader.
        accumulated: number of batches in a step; the last step of an epoch may have fewer, as in Trainer.
    """

    def __init__(self, make: Callable[[], DataLoader[Any]], accumulated: int) -> None:
        self._make = make
        self._accumulated = accumulated
        self._begin()

    def _begin(self) -> None:
        self._loader = self._make()
        self._epoch, self._before = -1, 0
        self._batches: list[list[int]] = []  # for each batch of the present epoch, the indices of its samples

    def of_step(self, seed: int, position: int, size: int, *, by_epoch: bool) -> Iterator[tuple[Made, int]]:
        """Yield the updates of a step (one update, or those of the rest of the epoch), each with the number of batches
        consumed up to its end."""
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
        """Let the sampler draw the order of the next epoch. Epochs are drawn in sequence, since a sampler may continue
        its generator from epoch to epoch."""
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
                generator=loader.generator,  # a DataLoader draws from it, too, as the Trainer's does
            )
            self._batches = list(numbers)
        if len(self._batches) % self._accumulated and len(self._batches) != len(loader):
            raise UsageError(
                f"epoch {self._epoch} has {len(self._batches)} batches, but its loader's length is {len(loader)}, and "
                f"{self._accumulated} batches are accumulated: Trainer would carry gradients into the next epoch. Set "
                f"gradient_accumulation_steps=1"
            )
        if not self._batches:
            raise UsageError(f"the Trainer's own loader has no batch in epoch {self._epoch}. Lower the batch size")


def _fetched(dataset: Any, numbers: list[int]) -> list[Any]:
    together = getattr(dataset, "__getitems__", None)
    return together(numbers) if together is not None else [dataset[number] for number in numbers]
