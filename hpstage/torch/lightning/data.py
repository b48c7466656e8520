"""The data of a LightningTrainable: loaded once per process, unless a module makes its own, and served in an order that
hpstage decides."""

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
    """Return the batches of what ``train_dataloader()`` has returned.

    Raises:
        UsageError: hpstage cannot decide their order.
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(f"train_dataloader() returned {type(loader).__name__}; it must return one DataLoader")
    batches = batches_of(loader, None, None, who="train_dataloader()")  # Lightning moves them to the device
    if not isinstance(batches, Batches):
        raise UsageError(
            f"train_dataloader() returned a DataLoader over a stream, a {type(loader.dataset).__name__}; let it be "
            f"one over a map-style data set"
        )
    return batches


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
        self.training = training_set(self.datamodule.train_dataloader())
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


class TrainingBatches:
    """The training batches of one fit, which Lightning iterates over once per epoch.

    An epoch ends with a short batch, or none if the DataLoader drops it. The cursor is the number of samples passed.

    Args:
        training: where they come from.
        pause: is called where the next batch is requested, and returns the seed.
    """

    def __init__(self, training: Batches, pause: Callable[[], int]) -> None:
        self._batches, self._cut = training, training.cut
        self._pause = pause
        self.dataset = training.dataset  # Lightning looks whether it is a stream
        self.batch_size = self.default_size = training.batch_size or 1
        self.samples = 0

    def __len__(self) -> int:
        return self._cut.count(self.batch_size)

    @property
    def left(self) -> int:
        """Number of samples that the epoch has left."""
        return self._cut.end_of_epoch(self.samples) - self.samples

    @property
    def batches_left(self) -> int:
        return self._cut.count(self.batch_size, self.left)

    def __iter__(self) -> TrainingBatches:
        self.samples += -self.samples % self._cut.population  # what the last epoch has left out is passed
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
