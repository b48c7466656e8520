"""The data of a LightningTrainable: loaded once per process, unless each module makes its own data, and served in an
order that hpstage decides."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from hpstage.errors import UsageError
from hpstage.torch.data import Batches, batches_of
from hpstage.training.randomness import Purpose, rekey

if TYPE_CHECKING:
    from hpstage.torch.lightning.trainable import LightningTrainable


def training_set(loader: Any) -> Batches:
    """Return the batches of the object that ``train_dataloader()`` has returned.

    Raises:
        UsageError: hpstage cannot decide their order.
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(f"train_dataloader() returned {type(loader).__name__}; it must return one DataLoader")
    batches = batches_of(loader, None, None, who="train_dataloader()")  # Lightning moves them to the device
    if not isinstance(batches, Batches):
        raise UsageError(
            f"train_dataloader() returned a DataLoader over a stream, a {type(loader.dataset).__name__}; it must be "
            f"over a map-style data set"
        )
    return batches


class Data:
    """The DataModule of a trainable after ``setup("fit")``, and its training set."""

    def __init__(self, subject: LightningTrainable) -> None:
        # `setup` sets attributes: on a copy, so that the user's DataModule stays as it was.
        if subject.datamodule is not None:
            self.datamodule = copy.copy(subject.datamodule)
        else:
            self.datamodule = _Loaders(subject.train_dataloaders, subject.val_dataloaders)
        self.datamodule.trainer = None
        rekey(0, 0, Purpose.DATA)
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")
        self.training = training_set(self.datamodule.train_dataloader())
        held: Any = self.datamodule  # each Trainer calls these methods again, on data that are loaded already
        held.prepare_data = held.setup = held.teardown = _nothing

    def of_validation(self) -> list[Any]:
        """Return the data sets for validation."""
        rekey(0, 0, Purpose.DATA)
        loaders: Any = self.datamodule.val_dataloader()
        if isinstance(loaders, Mapping):
            loaders = list(loaders.values())
        if not isinstance(loaders, list | tuple):
            loaders = [loaders]
        return [getattr(loader, "dataset", loader) for loader in loaders]


class TrainingBatches:
    """The training batches of one fit, which Lightning iterates over once per epoch.

    The last batch of an epoch may be short; with ``drop_last``, the DataLoader drops it. The position is the number of
    samples consumed.

    Args:
        training: the batches of the training set.
        pause: called when the next batch is requested; returns the seed.
    """

    def __init__(self, training: Batches, pause: Callable[[], int]) -> None:
        self._batches, self._cut = training, training.cut
        self._pause = pause
        self.dataset = training.dataset  # Lightning checks whether it is a stream
        self.batch_size = self.default_size = training.batch_size or 1
        self.samples = 0

    def __len__(self) -> int:
        return self._cut.count(self.batch_size)

    @property
    def left(self) -> int:
        """Number of samples left in the epoch."""
        return self._cut.end_of_epoch(self.samples) - self.samples

    @property
    def batches_left(self) -> int:
        return self._cut.count(self.batch_size, self.left)

    def __iter__(self) -> TrainingBatches:
        self.samples += -self.samples % self._cut.population  # skip samples that the last epoch has dropped
        return self

    def __next__(self) -> Any:
        seed = self._pause()
        count = min(self.batch_size, self.left)
        batch = self._batches.take(seed, self.samples, count, self.batch_size)
        self.samples += count
        return batch


class _Loaders(LightningDataModule):  # type: ignore[misc]  # its base has no types
    """DataLoaders as a DataModule."""

    def __init__(self, train: Any, val: Any) -> None:
        super().__init__()
        self._train, self._val = train, val

    def train_dataloader(self) -> Any:
        return self._train

    def val_dataloader(self) -> Any:
        return [] if self._val is None else self._val


def _nothing(*args: object, **kwargs: object) -> None:
    """Do nothing: the data are loaded already."""
