"""Trainables of virtual nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpstage.errors import StopTraining
from tests.torch.trainables import Small, adam, samples, sgd

STEPS = 10
SIZE = 32


def hp_at(step: int) -> dict[str, Any]:
    """The learning rate drops at 6; the batch size changes at 4."""
    return {"lr": 0.1 if step < 6 else 0.01, "batch_size": 8 if step < 4 else 16, "momentum": 0.9, "seed": 3}


class Nodes(Small):
    """A CNN with BatchNorm and dropout."""

    virtual_nodes = 4


class ByEpoch(Nodes):
    step_unit = "epoch"

    def dataset(self) -> Any:
        return DataLoader(TensorDataset(*samples()), batch_size=8, shuffle=True, drop_last=True)


class Clipped(Nodes):
    """Clips gradients where they are those of the batch."""

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model, hp)
        optimizer.register_step_pre_hook(clip)
        return optimizer


def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)


class Bag(Nodes):
    """An embedding with sparse gradients, in a batch that is a dict."""

    def __init__(self, make_optimizer: Callable[..., torch.optim.Optimizer] = sgd, *, dense: bool = True) -> None:
        super().__init__(make_optimizer)
        self.dense = dense

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        classifier = nn.Linear(4, 3).requires_grad_(self.dense)
        return nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True, mode="sum"), nn.ReLU(), classifier)

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return self.make_optimizer([p for p in model.parameters() if p.requires_grad], hp)

    def dataset(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        words = torch.randint(0, 10, (SIZE, 5), generator=generator)
        return [{"words": row, "label": int(row.sum()) % 3} for row in words]

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["words"]), batch["label"])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"norm": float(sum(p.norm() for p in model.parameters()))}


class Experts(Nodes):
    """Parameters of which some virtual nodes use none; a buffer that is replaced, and one that cannot be averaged."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return Routed()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)


class Routed(nn.Module):
    mask: torch.Tensor
    usual: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 3) for _ in range(3))
        self.unused = nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), torch.finfo(torch.float32).max]))
        self.register_buffer("usual", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.usual = 0.9 * self.usual + 0.1 * x.mean()
        chosen = int(x.sum().abs() * 10) % 3
        return self.experts[chosen](x.flatten(1)) + self.mask.clamp(-1, 0)


class Faulty(Nodes):
    """Fails at chosen samples, whichever process has them in its virtual nodes; the data keep their order."""

    def __init__(self, make_error: Callable[[str], Exception], bad: tuple[int, ...], step: int = 2) -> None:
        super().__init__()
        self.make_error, self.bad, self.step = make_error, bad, step

    def dataset(self) -> Any:
        x, y = samples()
        return DataLoader(TensorDataset(x[:24], y[:24], torch.arange(24)), batch_size=8, shuffle=False)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, index = batch
        for bad in self.bad:
            if bad in index:
                raise self.make_error(f"sample {bad}")
        return super().loss(model, (x, y))


class Unread(Exception):
    """One that cannot be pickled, as it takes two arguments."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one}, {two}")


class Infinite(Nodes):
    """Its loss becomes infinite in the part of a batch that has a certain sample."""

    def dataset(self) -> Any:
        x, y = samples()
        return DataLoader(TensorDataset(x[:24], y[:24], torch.arange(24)), batch_size=8, shuffle=False)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, index = batch
        return super().loss(model, (x, y)) * (float("inf") if 14 in index else 1.0)


class Counting(Nodes):
    """Counts, in an attribute, the parts of a batch that have a certain sample."""

    def __init__(self, sample: int) -> None:
        super().__init__()
        self.sample = sample
        self.count = 0

    def dataset(self) -> Any:
        x, y = samples()
        return DataLoader(TensorDataset(x[:24], y[:24], torch.arange(24)), batch_size=8, shuffle=False)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, index = batch
        self.count += int(self.sample in index)
        return super().loss(model, (x, y))


def unread(text: str) -> Exception:
    return Unread(text, "in two arguments")


def sparse_adam(parameters: Any, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(parameters, lr=hp["lr"])


CASES: dict[str, Callable[[], Nodes]] = {
    "cnn": Nodes,
    "bag": Bag,
    "adam": lambda: Nodes(adam),
    "sparse-adam": lambda: Bag(sparse_adam, dense=False),
    "experts": Experts,
    "epoch": ByEpoch,
    "clipped": Clipped,
}
FAULTS: dict[str, Callable[[], Nodes]] = {
    "a node of the leader": lambda: Faulty(ValueError, (9,)),
    "a node of a follower": lambda: Faulty(ValueError, (15,)),
    "both": lambda: Faulty(ValueError, (15, 9)),
    "one that ends training": lambda: Faulty(StopTraining, (15,)),
    "one that cannot be pickled": lambda: Faulty(unread, (15,)),
    "an infinite loss": Infinite,
}
COUNTERS: dict[str, Callable[[], Nodes]] = {
    "of the leader": lambda: Counting(0),
    "of a follower": lambda: Counting(7),
}


class Logging(Nodes):
    """Logs what each virtual node sees."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        self.log("train_loss", loss)
        self.log("first", batch[0].flatten()[0])
        return loss


LOGGING: dict[str, Callable[[], Any]] = {"logging": Logging}
ALL = CASES | FAULTS | COUNTERS | LOGGING
