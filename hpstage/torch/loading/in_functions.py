"""``run.batches``: the batches of a training function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from hpstage.errors import UsageError
from hpstage.schedule import Scalar
from hpstage.torch.data import Batches
from hpstage.torch.data import batches_of as opened
from hpstage.torch.loading.mixture import seed_in
from hpstage.torch.loading.orders import Sequential
from hpstage.torch.loading.streams import StreamBatches
from hpstage.torch.loading.taken_over import Source, Workers
from hpstage.training.run import Run, Steps
from hpstage.training.sample_order import SampleOrder

_KEPT = "batches"


class Loader:
    """The batches of a training function, and the processes that load them, kept from one call of the function to the
    next."""

    def __init__(self, batches: Batches | StreamBatches, initial: dict[str, Scalar], batch_size: int | None) -> None:
        self.batches = batches
        self.initial = initial
        self.batch_size = batch_size
        self.check, self.close, self.position = batches.check, batches.close, batches.position

    def take_over(self, before: Loader, *, same_call: bool) -> None:
        """Replace an earlier loader: continue with its processes if they load the same samples, or at the position of
        its stream.

        ``same_call``: whether the same call of the function opened both loaders.
        """
        new, old = self.batches, before.batches
        if isinstance(new, Batches) and isinstance(old, Batches) and new.processes and old.processes:
            known = not same_call and self.initial == before.initial
            if (known or _same_objects(new.source, old.source)) and old.processes.adopt(new.samples):
                new.processes, old.processes = old.processes, None
        if same_call and isinstance(new, StreamBatches) and isinstance(old, StreamBatches):
            new.go_to(old.position())
        old.close()

    def size_in(self, run: Run) -> int:
        size = run.hp.get("batch_size", self.batch_size)
        if type(size) is not int or size < 1:
            raise UsageError(
                f"run.batches(): the batch size is {size!r}; it must be a whole number of at least 1. Give a "
                f"hyperparameter 'batch_size', batch_size=..., or a DataLoader with a batch size"
            )
        return size

    def of_step(self, run: Run, *, by_epoch: bool) -> Iterator[Any]:
        size = self.size_in(run)
        self.batches.see_size(size)
        seed = seed_in(getattr(self.batches, "dataset", None), run.hp)
        for batch, samples in self.batches.of_step(seed, run._samples, size, by_epoch=by_epoch):
            run._samples = samples
            yield batch

    def begin(self, run: Run) -> None:
        if run._stream is not None:
            self.batches.go_to(run._stream)
            run._stream = None
        self.batches.settle()


def _same_objects(new: Source, old: Source) -> bool:
    """Return whether two sources surely load the same samples: they consist of the same objects and settings."""
    return (
        new.dataset is old.dataset
        and new.collate is old.collate
        and (new.cut, new.workers) == (old.cut, old.workers)
        and type(new.order) is type(old.order)
        and type(new.order) in (SampleOrder, Sequential)
    )


class StepBatches(Steps):
    """One batch for each step."""

    def __init__(self, run: Run, loader: Loader) -> None:
        super().__init__(run)
        self._loader = loader
        self._error: Exception | None = None

    def __next__(self) -> Any:
        first = not self._begun
        super().__next__()
        if self._error is not None:
            raise self._error  # no step follows a failed step
        try:
            if first:
                self._loader.begin(self._run)
            return next(self._loader.of_step(self._run, by_epoch=False))
        except Exception as error:
            self._error = error
            raise


class EpochBatches(Iterator[Any]):
    """The batches of one epoch. It has the attributes of a DataLoader that the user's helper functions may read."""

    def __init__(self, run: Run, loader: Loader, data: Any) -> None:
        self._run, self._loader, self._data = run, loader, data
        self._batches = _epoch(run, loader)

    @property
    def dataset(self) -> Any:
        return self._data.dataset if isinstance(self._data, DataLoader) else self._data

    @property
    def batch_size(self) -> int:
        return self._loader.size_in(self._run)

    def __len__(self) -> int:
        batches = self._loader.batches
        if not isinstance(batches, Batches):
            raise TypeError("an epoch of a stream has no length")
        return batches.cut.count(self.batch_size)

    def __next__(self) -> Any:
        return next(self._batches)


def batches_of(loaders: dict[str, Any], run: Run, data: Any, batch_size: int | None, num_workers: int) -> Iterator[Any]:
    """Return the batches of :meth:`hpstage.Run.batches`. Their loader is kept in ``loaders``, so that the next call may
    reuse it."""
    if isinstance(data, DataLoader) and num_workers:
        raise UsageError("run.batches(loader, num_workers=...): a DataLoader states its num_workers itself")
    loader: Loader | None = loaders.get(_KEPT)
    batches = None if loader is None else loader.batches
    outdated = isinstance(batches, Batches) and run._looping and batches.source.outdated(within=True) is not None
    if loader is None or run._given is not data or outdated:  # a fork would open the data as they are now
        loader = loaders[_KEPT] = _opened(run, data, batch_size, num_workers, loader)
    return EpochBatches(run, loader, data) if run._looping else StepBatches(run, loader)


def _opened(run: Run, data: Any, batch_size: int | None, num_workers: int, before: Loader | None) -> Loader:
    who = "the argument of run.batches()"
    batches = opened(data, None, None, Workers(num_workers), by_epoch=run._looping, who=who)
    if isinstance(batches, Batches):
        population = batches.cut.population
        if run._population not in (None, population):
            raise UsageError(
                f"run.batches() was first given data with {run._population} samples in an epoch, and now with "
                f"{population}. A run has one position in its data: give it batches of only one data set"
            )
        run._population = population
    loader = Loader(batches, dict(run._initial), batch_size if batch_size is not None else batches.batch_size)
    if before is not None:
        loader.take_over(before, same_call=run._given is not None)
    run._given = data
    return loader


def _epoch(run: Run, loader: Loader) -> Iterator[Any]:
    """Yield the batches of the next epoch. As with a DataLoader, an epoch that the user left before its end is not
    continued."""
    loader.begin(run)
    if run._population is not None:
        run._samples += -run._samples % run._population
    empty = True
    for batch in loader.of_step(run, by_epoch=True):
        empty = False
        yield batch
    if empty:
        raise UsageError("run.batches(): an epoch of the data has no batch; give more samples, or a smaller batch size")
