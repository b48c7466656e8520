"""Small trainables for the tests; run as a script, it continues from saved states in a process of its own."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hpstage.torch
from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.state_tree import digest
from hpstage.plan.facts import StateKey
from hpstage.trainable import Trainable
from hpstage.training.run import Run
from hpstage.training.trainables import as_trainable

SAMPLES = 30
STEPS, FORK = 12, 6


def hp_at(step: int) -> dict[str, Any]:
    """The learning rate drops at 7, after the fork; the batch size changes at 5, in the middle of an epoch."""
    return {"lr": 0.1 if step < 7 else 0.01, "batch_size": 8 if step < 5 else 12, "momentum": 0.9, "seed": 3}


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 1, 8, 8, generator=generator), torch.arange(SAMPLES) % 3


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(144, 3)
    )


def sgd(parameters: Any, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=hp["lr"], momentum=hp["momentum"])


def adam(parameters: Any, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=hp["lr"])


def fused_adamw(parameters: Any, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=hp["lr"], fused=True)


class Small(hpstage.torch.TorchTrainable):
    """A CNN with BatchNorm and dropout."""

    device = "cpu"

    def __init__(self, make_optimizer: Callable[..., torch.optim.Optimizer] = sgd) -> None:
        self.make_optimizer = make_optimizer

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return network()

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return self.make_optimizer(model.parameters(), hp)

    def dataset(self) -> TensorDataset:
        return TensorDataset(*samples())

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        x, y = samples()
        return {"accuracy": (model(x).argmax(1) == y).float().mean().item(), "loss": float(self.loss(model, (x, y)))}


class Averaged(Small):
    """With an exponential moving average of the weights, which is evaluated."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        model = network()
        self.average = copy.deepcopy(model)
        return model

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        super().update(model, optimizer, batch)
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.1)

    def extra_state(self) -> Any:
        return self.average.state_dict()

    def load_extra_state(self, state: Any) -> None:
        self.average.load_state_dict(state)


class ByEpoch(Small):
    step_unit = "epoch"


def ordinary_loop(run: Run) -> None:
    x, y = samples()
    model = network()
    optimizer = sgd(model.parameters(), run.hp)
    run.attach(model=model, optimizer=optimizer)
    for _ in run.steps():
        batch = run.indices(len(x), run.hp["batch_size"])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        if run.wants_report:
            model.eval()
            with torch.no_grad():
                run.report(loss=nn.functional.cross_entropy(model(x), y))
            model.train()


CASES: dict[str, Callable[[], object]] = {
    "sgd": Small,
    "adam": lambda: Small(adam),
    "fused-adamw": lambda: Small(fused_adamw),
    "average": Averaged,
    "epoch": ByEpoch,
    "function": lambda: ordinary_loop,
}


def fresh(obj: object, hp: Mapping[str, Any] | None = None) -> Trainable:
    trainable = as_trainable(obj)
    trainable.setup(hp_at(0) if hp is None else hp)
    return trainable


def advance(trainable: Trainable, start: int, stop: int) -> Trainable:
    for step in range(start, stop):
        trainable.train(step, hp_at(step))
    return trainable


def outcome(trainable: Trainable) -> list[object]:
    """Everything that must agree: the metrics, before and after the state is read, and the digest of it."""
    metrics = dict(trainable.evaluate())
    return [digest(trainable.state_dict()), metrics, dict(trainable.evaluate())]


def forked(obj: object, state: object) -> Trainable:
    trainable = fresh(obj)
    trainable.load_state_dict(state)
    return advance(trainable, FORK, STEPS)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    store = FolderCheckpoints(folder, "tests")
    print(json.dumps({name: outcome(forked(make(), store.load(StateKey(name)))) for name, make in CASES.items()}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
