"""Stacked searches of trainables whose siblings differ in more than numbers, or share what one of them would change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from hpstage import schedule as s
from hpstage.errors import UsageError
from tests.torch.backends.test_siblings import Siblings, X, Y, kept, search

pytestmark = pytest.mark.sampled(8)

SETTINGS: dict[str, Any] = {"scale": 1.0}


class Plain(Siblings):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"], weight_decay=hp.get("weight_decay", 0.0))


class Wide(Plain):
    """Two shapes of the same number of elements, and others."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        first, second = [(4, 8), (8, 4), (3, 7)][hp["kind"]]
        layers = [nn.Linear(4, first, bias=False), nn.Linear(first, second, bias=False), nn.Linear(second, 1)]
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Choosing(nn.Module):
    """Calls one of two modules, both of which it has in any case."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 1)
        self.relu, self.tanh = nn.ReLU(), nn.Tanh()
        self.chosen = self.tanh if kind else self.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.chosen(self.first(x)))


class Sharing(Plain):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return Choosing(hp["kind"] % 2)


class Asking(Plain):
    """Some trials have a hyperparameter that others have not."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        return loss * self.hp["power"] if "power" in self.hp else loss  # type: ignore[operator]


class Listing(Plain):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * len(self.hp)


class Remembering(nn.Module):
    """Has a buffer that is the weights before the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("before", torch.zeros(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x) + (self.layer.weight - self.before).sum()
        if self.training:
            self.before = self.layer.weight.detach().clone()
        return out  # type: ignore[no-any-return]


class Anchored(Plain):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return Remembering()


class SetsData(Plain):
    """``dataset()`` sets attributes that the loss and the metrics need."""

    def dataset(self) -> Any:
        self.x, self.mean = X.clone(), X.mean(0)
        return TensorDataset(self.x, Y)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, (batch[0] - self.mean, batch[1]))


class Buffering(Plain):
    """All batches of a size are put into one tensor."""

    stateless = ("out",)

    def __init__(self) -> None:
        self.out: dict[int, torch.Tensor] = {}

    def collate(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        return self.out.setdefault(len(x), torch.zeros_like(x)).copy_(x), y


def space(trial: optuna.Trial) -> dict[str, Any]:
    """Weight decay begins later in some, which is another formula."""
    some = {"power": 3} if trial.number % 2 else {}
    kind = trial.number % 3
    decay = s.piecewise({0: 0.0, 4: 0.1}) if kind else 0.0
    return {"lr": 0.05, "batch_size": 6, "seed": trial.number // 6, "kind": kind, "weight_decay": decay, **some}


def stacked_and_eager(kind: type[Plain], stacked: int, numerics: str) -> Any:
    trainable = kind()
    trainable.numerics = numerics
    return search(trainable, stacked, space, n_trials=6, verify="off")


@pytest.mark.parametrize(
    "kind", [Wide, Sharing, Asking, Listing, Anchored, SetsData, Buffering, Plain], ids=lambda kind: kind.__name__
)
@pytest.mark.one_in(2)
@pytest.mark.ci_one_in(2)
@pytest.mark.ci
def test_siblings_of_different_structure_have_the_bits_of_training_without_siblings(kind: type[Plain]) -> None:
    alone, together = (stacked_and_eager(kind, stacked, "stacked") for stacked in (1, 4))
    ours, theirs = kept(alone), kept(together)
    common = ours.keys() & theirs.keys()
    assert len(common) > 5 and all(ours[key] == theirs[key] for key in common)
    values = [
        [trial.value for trial in result.study.trials]
        for result in (alone, together, stacked_and_eager(kind, 1, "eager"))
    ]
    assert values[0] == values[1]
    assert values[0] == pytest.approx(values[2], rel=1e-4)


class CountsLoads(SetsData):
    made = 0

    def dataset(self) -> Any:
        type(self).made += 1
        return super().dataset()


@pytest.mark.ci
def test_data_are_loaded_once_for_all_slots() -> None:
    stacked_and_eager(CountsLoads, 4, "stacked")
    assert CountsLoads.made == 1


class CountingCollate(Plain):
    batches = 0

    def collate(self, samples: list[Any]) -> Any:
        self.batches += 1
        return default_collate(samples)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * self.batches


class Counted(Dataset[Any]):
    def __init__(self) -> None:
        self.seen = [0]

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        self.seen[0] += 1
        return X[index], Y[index]


class CountingData(Plain):
    def dataset(self) -> Any:
        return Counted()


class SetsGlobals(Plain):
    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        SETTINGS["scale"] = 2.0 + hp["kind"]
        return super().model(hp)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * SETTINGS["scale"]


@pytest.mark.parametrize(
    ("kind", "named"), [(CountingCollate, "self.batches"), (CountingData, "dataset.seen"), (SetsGlobals, "SETTINGS")]
)
@pytest.mark.parametrize("stacked", [1, 3])
def test_an_object_that_all_siblings_share_is_refused_if_training_changes_it(
    kind: type[Plain], named: str, stacked: int
) -> None:
    with pytest.raises(UsageError, match=f"{named}.*numerics = 'stacked'"):
        search(kind(), stacked, space, n_trials=3)
