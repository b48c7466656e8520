"""Trainables whose siblings are stacked, and members of them that differ in everything that members may differ in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import hpstage.torch
from hpstage.torch.backends.stacked import Builder, Bundle, Member
from hpstage.training.randomness import rekey
from hpstage.workloads.gpt import GPT

CPU = torch.device("cpu")
Hp = Mapping[str, Any]


class Sibling(hpstage.torch.TorchTrainable):
    """What all of them share: images of 6 x 6 in 5 classes."""

    device = "cpu"
    batch = 6
    follows: tuple[str, ...] = ("lr",)
    """Fields of param groups that change."""

    def dataset(self) -> Any:
        raise AssertionError("batches are made by hand")

    def seed_of(self, id: int) -> int:
        """Return the seed of a member's random numbers."""
        return id

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def data(self, generator: torch.Generator, size: int) -> Any:
        return torch.randn(size, 1, 6, 6, generator=generator), torch.randint(5, (size,), generator=generator)


class Mlp(Sibling):
    """Layers of odd widths, plain SGD, and a loss that reads a hyperparameter."""

    def model(self, hp: Hp) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 17), nn.GELU(), nn.Linear(17, 9), nn.Tanh(), nn.Linear(9, 5))

    def optimizer(self, model: nn.Module, hp: Hp) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        logits = model(x)
        return nn.functional.cross_entropy(logits, y) + self.hp["penalty"] * logits.square().mean()


class Cnn(Sibling):
    """Batch normalisation, dropout, momentum, weight decay, a frozen layer."""

    follows = ("lr", "momentum", "weight_decay")

    def model(self, hp: Hp) -> nn.Module:
        first = nn.Conv2d(1, 4, 3, padding=1)
        first.bias.requires_grad_(False)
        return nn.Sequential(
            *(first, nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, bias=False), nn.BatchNorm2d(8)),
            *(nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(8, 5)),
        )

    def optimizer(self, model: nn.Module, hp: Hp) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            model.parameters(), lr=hp["lr"], momentum=hp["momentum"], weight_decay=hp["weight_decay"], dampening=0.1
        )


class Nesterov(Mlp):
    follows = ("lr", "momentum")

    def optimizer(self, model: nn.Module, hp: Hp) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"], momentum=hp["momentum"], nesterov=True)


class CoupledAdam(Mlp):
    follows = ("lr", "weight_decay", "betas")

    def optimizer(self, model: nn.Module, hp: Hp) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=hp["lr"], weight_decay=hp["weight_decay"])


class TinyGpt(Sibling):
    """Attention, embeddings, dropout; AdamW on two groups; clipped gradients."""

    batch = 2
    follows = ("lr", "betas")

    def model(self, hp: Hp) -> nn.Module:
        return GPT(layers=1, heads=2, width=12, block=5, dropout=0.1)

    def optimizer(self, model: nn.Module, hp: Hp) -> torch.optim.Optimizer:
        matrices = [weight for weight in model.parameters() if weight.dim() > 1]
        vectors = [weight for weight in model.parameters() if weight.dim() == 1]
        groups = [{"params": matrices, "weight_decay": hp["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=hp["lr"], betas=(hp["beta1"], 0.95))

    def group_values(self, group: dict[str, Any], hp: Hp) -> Mapping[str, Any]:
        return {"lr": hp["lr"], "betas": (hp["beta1"], 0.95)}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    def data(self, generator: torch.Generator, size: int) -> Any:
        return torch.randint(256, (size, 6), generator=generator)


def hp_of(id: int, step: int) -> dict[str, Any]:
    """A member's hyperparameters: all change at every step."""
    way = 1 + 0.1 * id + 0.03 * step
    return {
        "lr": 0.05 * way,
        "momentum": 0.8 + 0.01 * id,
        "weight_decay": 0.01 * way,
        "beta1": 0.9 - 0.01 * step,
        "penalty": 0.02 * way,
        "seed": id,
        "layers": 3,
    }


class Trial:
    """A member: it knows its data, its values and its random numbers at each step."""

    def __init__(self, subject: Sibling, id: int) -> None:
        self.subject, self.id, self.step = subject, id, 0
        torch.manual_seed(id)
        self.model = subject.model(hp_of(id, 0))
        self.optimizer = subject.optimizer(self.model, hp_of(id, 0))
        self.member: Member | None = None
        self.losses: list[float] = []

    def turn(self) -> tuple[Any, dict[str, Any]]:
        """Begin the next step: return its batch and its values."""
        hp = hp_of(self.id, self.step)
        for group in self.optimizer.param_groups:
            values = self.subject.group_values(group, hp)
            group.update({name: value for name, value in values.items() if name in self.subject.follows})
        batch = self.subject.data(torch.Generator().manual_seed(1000 * self.id + self.step), self.subject.batch)
        rekey(self.subject.seed_of(self.id), self.step)
        self.step += 1
        return batch, hp

    def state(self) -> dict[str, Any]:
        """Everything, as what can be compared."""
        return {
            "model": {name: _bits(tensor) for name, tensor in self.model.state_dict().items()},
            "optimizer": {
                key: {name: _bits(torch.as_tensor(value)) for name, value in state.items()}
                for key, state in self.optimizer.state_dict()["state"].items()
            },
            "losses": self.losses,
        }


def _bits(tensor: Tensor) -> tuple[Any, ...]:
    return (str(tensor.dtype), tuple(tensor.shape), tensor.detach().contiguous().numpy().tobytes())


def train(bundle: Bundle, trials: list[Trial], most: int | None = None) -> None:
    """Train one step of exactly these trials: others leave, new ones join.

    Args:
        most: how many of them by one program, at most.
    """
    for member in [member for member in bundle.members if member not in [trial.member for trial in trials]]:
        bundle.leave(member)
    for trial in trials:
        if trial.member not in bundle.members:
            trial.member = bundle.join(trial.model, trial.optimizer)
    slots = sorted(trials, key=lambda trial: bundle.members.index(trial.member))  # type: ignore[arg-type]
    turns = []
    for trial in slots:
        turns.append(trial.turn())
        assert trial.member is not None
        trial.member.stream = torch.get_rng_state()
    losses = bundle.step([batch for batch, _ in turns], [hp for _, hp in turns], most)
    assert losses is not None
    for trial, loss in zip(slots, losses.tolist(), strict=True):
        trial.losses.append(loss)


def train_eagerly(trial: Trial) -> None:
    """Train one step by ``update()`` itself."""
    batch, trial.subject.hp = trial.turn()
    loss: Any = trial.subject.update(trial.model, trial.optimizer, batch)
    trial.losses.append(loss.item())


def builder(subject: Sibling, effects: Any = None) -> Builder:
    return Builder(subject, CPU, effects)
