"""Data sets and trainables whose samples are made on request, with random numbers of all three libraries."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hpstage.torch.loading.processes import Processes
from hpstage.training.function import FunctionTrainable
from hpstage.training.run import Run
from tests.torch.trainables import SAMPLES, Small, network, samples, sgd


class Augmented(Dataset[Any]):
    """A sample is augmented by numbers from Python's, NumPy's and torch's generators."""

    def __init__(self) -> None:
        self.x, self.y = samples()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return self.x[index] * noise, self.y[index]


DATA = Augmented()


class Loading(Small):
    """Trained on augmented samples; dropout draws from the generators of the training process."""

    def dataset(self) -> Any:
        return DATA


class Mixed(Loading):
    """Draws while it collates."""

    def collate(self, samples: list[Any]) -> Any:
        x, y = zip(*samples, strict=True)
        return torch.stack(x) * random.random(), torch.stack(y)


class Epochs(Loading):
    step_unit = "epoch"


class OfLoader(Loading):
    """Returns a DataLoader, whose last batch is short or dropped."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def dataset(self) -> Any:
        return DataLoader(DATA, batch_size=8, shuffle=True, num_workers=self.num_workers, **self.options)


class EpochsOfLoader(OfLoader):
    step_unit = "epoch"


def with_workers(obj: Any, count: int) -> Any:
    obj.num_workers = count
    return obj


def by_batch(count: int, **options: Any) -> Any:
    """The loop of an ordinary script, a batch for each step."""

    def train(run: Run) -> None:
        loader = DataLoader(Augmented(), batch_size=8, shuffle=True, num_workers=count, **options)
        model = network()
        optimizer = sgd(model.parameters(), run.hp)
        run.attach(model=model, optimizer=optimizer)
        for x, y in run.batches(loader):
            step(model, optimizer, x, y)
            measured(run, model)

    return train


def by_epoch(count: int, **options: Any) -> Any:
    """The two loops of an ordinary script, an epoch for each step."""

    def train(run: Run) -> None:
        loader = DataLoader(Augmented(), batch_size=8, shuffle=True, num_workers=count, **options)
        model = network()
        optimizer = sgd(model.parameters(), run.hp)
        run.attach(model=model, optimizer=optimizer)
        for _ in run.steps():
            for x, y in run.batches(loader):
                step(model, optimizer, x, y)
            measured(run, model)

    return train


def of_dataset(count: int) -> Any:
    """A data set in place of a DataLoader."""

    def train(run: Run) -> None:
        model = network()
        optimizer = sgd(model.parameters(), run.hp)
        run.attach(model=model, optimizer=optimizer)
        for x, y in run.batches(DATA, num_workers=count):
            step(model, optimizer, x, y)
            measured(run, model)

    return train


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def measured(run: Run, model: nn.Module) -> None:
    if run.wants_report:
        model.eval()
        with torch.no_grad():
            run.report(loss=nn.functional.cross_entropy(model(DATA.x), DATA.y))
        model.train()


CASES: dict[str, Any] = {
    "class": lambda count: with_workers(Loading(), count),
    "collate": lambda count: with_workers(Mixed(), count),
    "epochs": lambda count: with_workers(Epochs(), count),
    "loader": lambda count: with_workers(OfLoader(), count),
    "loader that drops": lambda count: with_workers(OfLoader(drop_last=True), count),
    "epochs that drop": lambda count: with_workers(EpochsOfLoader(drop_last=True), count),
    "function": by_batch,
    "function that drops": lambda count: by_batch(count, drop_last=True),
    "function by epochs": by_epoch,
    "function of a data set": of_dataset,
}


def pids_of(trainable: Any) -> list[int]:
    """Return the ids of the processes that load a trainable's data."""
    if isinstance(trainable, FunctionTrainable):
        found = trainable._loaders["batches"].batches.processes
    else:
        found = trainable._data().processes
    assert isinstance(found, Processes)
    return [] if found._batches is None else [process.pid for process in found._batches._workers]


def runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Labelled(Dataset[Any]):
    """Which process made a sample."""

    def __init__(self) -> None:
        self.x, self.y = samples()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], os.getpid()


class Watched(Small):
    """Notes which processes made its samples."""

    stateless = ("made_by",)
    num_workers = 2
    made_by: set[int]

    def __init__(self) -> None:
        super().__init__()
        self.made_by = set()

    data_version = "1"

    def dataset(self) -> Any:
        return Labelled()

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        x, y, made_by = batch
        self.made_by.update(made_by.tolist())
        super().update(model, optimizer, (x, y))


def hp_of(batch_size: int) -> Mapping[str, Any]:
    return {"lr": 0.1, "momentum": 0.9, "batch_size": batch_size, "seed": 3}
