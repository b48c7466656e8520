"""Processes that load, in the training processes of Dask workers."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from distributed import Client
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

import hpstage
import hpstage.torch
from hpstage import schedule as s
from hpstage.cluster import DaskExecutor
from hpstage.training.run import Run
from hpstage.training.trainables import as_trainable

optuna.logging.set_verbosity(optuna.logging.ERROR)

STEPS = 9


class Augmented(Dataset[Any]):
    """A sample is augmented by numbers of all three libraries; the first one of some order kills its process once."""

    def __init__(self, died: str = "") -> None:
        self.x = torch.randn(40, 6, generator=torch.Generator().manual_seed(5))
        self.died = died

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        if self.died and index == 17 and get_worker_info() is not None and not os.path.exists(self.died):
            Path(self.died).touch()
            os._exit(1)
        return self.x[index] + random.random() + float(np.random.rand()) + torch.rand(6), index % 3


class Net(hpstage.torch.TorchTrainable):
    device = "cpu"
    data_version = "1"
    stateless = ("died",)

    def __init__(self, num_workers: int, died: str = "") -> None:
        self.num_workers = num_workers
        self.died = died

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"], momentum=0.9)

    def dataset(self) -> Any:
        return Augmented(self.died)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"sum": model(Augmented().x).double().sum().item()}


def script(num_workers: int) -> Any:
    def train(run: Run) -> None:
        loader = DataLoader(Augmented(), batch_size=7, shuffle=True, num_workers=num_workers)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=run.hp["lr"], momentum=0.9)
        run.attach(model=model, optimizer=optimizer)
        for x, y in run.batches(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if run.wants_report:
                model.eval()
                run.report(sum=model(Augmented().x).double().sum().detach())
                model.train()

    return train


def space(trial: optuna.Trial) -> dict[str, Any]:
    drop = trial.suggest_categorical("drop", [2, 5])
    late = trial.suggest_categorical("late", [7, 11])
    sizes = s.piecewise({0: 7, 4: late})
    return {"lr": s.multistep(0.1, [drop], gamma=0.1), "batch_size": sizes, "seed": 3}


def search(trainable: object, client: Client, folder: Path) -> hpstage.Result:
    grid = {"drop": [2, 5], "late": [7, 11]}
    return hpstage.optimize(
        optuna.create_study(sampler=optuna.samplers.GridSampler(grid, seed=0)),
        trainable,
        space,
        metric="sum",
        steps=STEPS,
        n_trials=4,
        executor=DaskExecutor(client),
        store=folder,
        checkpoint_every=2,
    )


def alone(trainable: object, result: hpstage.Result, number: int) -> float:
    torch.set_num_threads(1)  # as on a worker
    net: Any = as_trainable(trainable)
    line = {name: schedule.until(STEPS) for name, schedule in result.schedules(number).items()}
    net.setup({name: schedule.value(0) for name, schedule in line.items()})
    for step in range(STEPS):
        net.train(step, {name: schedule.value(step) for name, schedule in line.items()})
    return float(dict(net.evaluate())["sum"])


@pytest.mark.slow  # in this process: tests/torch/test_loading_processes.py
def test_function_trainables_with_dataloader_workers_give_the_values_without_sharing(
    client: Client, tmp_path: Path
) -> None:
    result = search(script(2), client, tmp_path)
    assert result.savings.steps_trained < result.savings.steps_asked
    for trial in result.study.trials:
        assert trial.value == alone(script(0), result, trial.number)


@pytest.mark.ci
def test_class_trainables_give_the_values_without_sharing_if_a_dataloader_worker_dies(
    client: Client, tmp_path: Path
) -> None:
    died = str(tmp_path / "died")
    result = search(Net(2, died), client, tmp_path / "plan")
    assert os.path.exists(died)
    assert result.savings.steps_trained < result.savings.steps_asked
    for trial in result.study.trials:
        assert trial.value == alone(Net(0), result, trial.number)
