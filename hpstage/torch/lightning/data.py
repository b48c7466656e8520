"""The data of a LightningTrainable: loaded once per process, and served in an order that hpstage decides."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from hpstage.errors import UsageError
from hpstage.torch.data import Batches
from hpstage.training.randomness import Purpose, rekey

if TYPE_CHECKING:
    from hpstage.torch.lightning.trainable import LightningTrainable
    from hpstage.training.sample_order import Indices


class Data:
    """The DataModule of a trainable after ``setup("fit")``, and its training set."""

    def __init__(self, subject: LightningTrainable) -> None:
        # The user's own stays as it was: `setup` sets attributes.
        if subject.datamodule is not None:
            self.datamodule = copy.copy(subject.datamodule)
        else:
            self.datamodule = _Loaders(subject.train_dataloaders, subject.val_dataloaders)
        self.datamodule.trainer = None
        rekey(0, 0, Purpose.DATA)
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")
        loader = self.datamodule.train_dataloader()
        self.batch_size, self.drop_last = _checked(loader)
        collate = None if loader.collate_fn is default_collate else loader.collate_fn
        self.batches = Batches(loader.dataset, collate, torch.device("cpu"))  # Lightning moves them to the device
        self.shuffled = isinstance(loader.sampler, RandomSampler)
        if not self.shuffled:
            self.batches.order = _InOrder(len(loader.dataset))  # type: ignore[assignment]
        held: Any = self.datamodule  # what has been done is not done again by each Trainer
        held.prepare_data = held.setup = held.teardown = _nothing

    def of_validation(self) -> list[Any]:
        """Return the data sets by which training is validated."""
        rekey(0, 0, Purpose.DATA)
        loaders: Any = self.datamodule.val_dataloader()
        if isinstance(loaders, Mapping):
            loaders = list(loaders.values())
        if not isinstance(loaders, list | tuple):
            loaders = [loaders]
        return [getattr(loader, "dataset", loader) for loader in loaders]

    def text(self) -> str:
        """Return how the training set is served."""
        served = "shuffled" if self.shuffled else "in order"
        return f"{served}, batches of {self.batch_size}" + (", the last one dropped" if self.drop_last else "")


class TrainingBatches:
    """The training batches of one fit, which Lightning iterates over once per epoch.

    An epoch ends with a short batch, or none if the DataLoader drops it. The cursor is the number of samples passed.

    Args:
        data: where they come from.
        pause: is called where the next batch is asked for, and returns the seed.
    """

    def __init__(self, data: Data, pause: Callable[[], int]) -> None:
        self._data = data
        self._pause = pause
        self.dataset = data.batches.dataset  # Lightning looks whether it is a stream
        self.batch_size = data.batch_size
        self.samples = 0

    def __len__(self) -> int:
        return self.count(self._data.batches.order.population)

    def count(self, samples: int) -> int:
        """Return the number of batches that ``samples`` samples give."""
        return samples // self.batch_size if self._data.drop_last else math.ceil(samples / self.batch_size)

    @property
    def left(self) -> int:
        """Number of samples that the epoch has left."""
        return self._data.batches.order.rest(self.samples)

    def __iter__(self) -> TrainingBatches:
        # What the last epoch has left out is passed.
        population = self._data.batches.order.population
        self.samples = math.ceil(self.samples / population) * population
        return self

    def __next__(self) -> Any:
        seed = self._pause()
        size = min(self.batch_size, self.left)
        batch = self._data.batches.take(seed, self.samples, size)
        self.samples += size
        return batch


class _InOrder:
    """The samples of each epoch in the order of the data set."""

    def __init__(self, population: int) -> None:
        self.population = population

    def take(self, seed: int, position: int, count: int) -> Indices:
        return np.arange(position, position + count) % self.population

    def rest(self, position: int) -> int:
        return self.population - position % self.population


class _Loaders(LightningDataModule):  # type: ignore[misc]  # its base has no types
    """DataLoaders as a DataModule."""

    def __init__(self, train: Any, val: Any) -> None:
        super().__init__()
        self._train, self._val = train, val

    def train_dataloader(self) -> Any:
        return self._train

    def val_dataloader(self) -> Any:
        return [] if self._val is None else self._val


def _checked(loader: Any) -> tuple[int, bool]:
    """Return a training DataLoader's batch size and whether it drops the last one.

    Raises:
        UsageError: it does what cannot be carried over.
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(f"train_dataloader() returned {type(loader).__name__}; it must return one DataLoader")
    if type(loader.sampler) not in (RandomSampler, SequentialSampler) or loader.batch_size is None:
        sampler = loader.sampler if loader.batch_size is not None else loader.batch_sampler
        raise UsageError(
            f"the DataLoader of train_dataloader() has a {type(sampler).__name__}: hpstage decides the order, in which "
            f"a fork continues at any step; use shuffle=True or shuffle=False"
        )
    if isinstance(loader.sampler, RandomSampler) and (
        loader.sampler.replacement or loader.sampler.num_samples != len(loader.dataset)  # type: ignore[arg-type]
    ):
        raise UsageError("the RandomSampler of train_dataloader() draws with replacement, or a part: use shuffle=True")
    return loader.batch_size, loader.drop_last


def _nothing(*args: object, **kwargs: object) -> None:
    """Do nothing: the data are loaded already."""
