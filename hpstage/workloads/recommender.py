"""A recommender of films, with sparse gradients: a step changes only the embeddings of the films in a batch.

A user is represented by the mean of the embeddings of the films rated before, an ``nn.EmbeddingBag``. From it and the
embedding of the next film, a small network predicts the rating of that film (after Covington et al., "Deep Neural
Networks for YouTube Recommendations", RecSys 2016). ``SparseAdam`` trains the embeddings, ``Adam`` all other weights;
``update`` steps both. The second optimizer is an attribute; hpstage captures its moments, and the sparse gradients.

The data are MovieLens 100K (https://grouplens.org/datasets/movielens/100k/): the file ``u.data`` has one rating per
line: user, film, stars and time. Ratings before a point in time are for training, later ones for testing.

    export MOVIELENS=path/to/ml-100k/u.data
    hpstage run hpstage.workloads.recommender:Recommender hpstage.workloads.recommender:space \
        --metric error --direction minimize --steps 20 --n-trials 24 --algorithm 'SuccessiveHalving(5, 2)'
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hpstage
from hpstage import schedule as s

if TYPE_CHECKING:
    import optuna

REMEDY = (
    "unpack https://files.grouplens.org/datasets/movielens/ml-100k.zip again, and give its file u.data as `ratings` or "
    "in the environment variable MOVIELENS"
)


def read(ratings: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return users, films, stars and times, in order of time: int64 of shape (n, 4).

    Raises:
        hpstage.errors.UsageError: there is no such file, it is empty, or a line is not a rating.
    """
    if not Path(ratings).is_file():
        raise hpstage.errors.UsageError(f"there is no file {ratings}: {REMEDY}")
    lines = Path(ratings).read_text().splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        fields = line.split("\t")
        if len(fields) != 4 or not all(field.isdecimal() for field in fields) or not 1 <= int(fields[2]) <= 5:
            raise hpstage.errors.UsageError(
                f"line {number} of {ratings} is {line[:40]!r}, which is not a rating: {REMEDY}"
            )
        rows.append([int(field) for field in fields])
    if not rows:
        raise hpstage.errors.UsageError(f"{ratings} is empty: {REMEDY}")
    table = np.array(rows, dtype=np.int64)
    return table[np.lexsort((table[:, 1], table[:, 0], table[:, 3]))]


def histories(table: np.ndarray[Any, np.dtype[np.int64]], length: int) -> Tensor:
    """Return for each rating the last ``length`` films that its user had rated before, padded with 0."""
    seen: dict[int, list[int]] = {}
    found = np.zeros((len(table), length), dtype=np.int64)
    for row, (user, film) in enumerate(table[:, :2].tolist()):
        last = seen.setdefault(user, [])
        found[row, : len(last)] = last
        last.append(film)
        del last[:-length]
    return torch.from_numpy(found)


class Network(nn.Module):
    """Predicts the stars that a user gives a film, from the films that the user rated before."""

    def __init__(self, films: int, width: int) -> None:
        super().__init__()
        self.history = nn.EmbeddingBag(films, width, mode="mean", padding_idx=0, sparse=True)
        self.film = nn.Embedding(films, width, sparse=True)
        self.dense = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, history: Tensor, film: Tensor) -> Tensor:
        stars: Tensor = self.dense(torch.cat([self.history(history), self.film(film)], dim=1))
        return 3 + stars.squeeze(1)


class Recommender(hpstage.torch.TorchTrainable):
    """A recommender on MovieLens 100K. A step is an epoch.

    Args:
        ratings: the file; by default the environment variable MOVIELENS, else ``ml-100k/u.data`` in the working
            directory.
        width: size of the embeddings.
        length: number of films in a history.
    """

    step_unit = "epoch"

    def __init__(self, ratings: str | None = None, *, width: int = 32, length: int = 20) -> None:
        self.ratings = os.path.abspath(ratings or os.environ.get("MOVIELENS", "ml-100k/u.data"))
        self.width, self.length = width, length

    def dataset(self) -> TensorDataset:
        table = read(self.ratings)
        self.films = int(table[:, 1].max()) + 1
        history, film, stars = histories(table, self.length), torch.from_numpy(table[:, 1]), torch.tensor(table[:, 2])
        first_test = len(table) * 9 // 10
        self.test = history[first_test:], film[first_test:], stars[first_test:].float()
        return TensorDataset(history[:first_test], film[:first_test], stars[:first_test].float())

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return Network(self.films, self.width)

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        assert isinstance(model, Network)
        self.dense = torch.optim.Adam(model.dense.parameters(), lr=hp["dense_lr"])
        return torch.optim.SparseAdam([model.history.weight, model.film.weight], lr=hp["lr"])

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        history, film, stars = batch
        return nn.functional.mse_loss(model(history, film), stars)

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> Tensor:
        self.dense.param_groups[0]["lr"] = self.hp["dense_lr"]
        model.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        self.dense.step()
        return loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        at = next(model.parameters()).device
        history, film, stars = (part.to(at) for part in self.test)
        return {"error": nn.functional.mse_loss(model(history, film), stars).sqrt().item()}


def space(trial: optuna.Trial, epochs: int = 20) -> dict[str, s.Schedule | s.Scalar]:
    """The learning rate of the embeddings drops at some epoch; batches may grow from there on."""
    lr = trial.suggest_categorical("lr", [1e-2, 3e-3])
    drop = epochs * trial.suggest_categorical("drop_at", [40, 60, 80]) // 100
    batch = trial.suggest_categorical("late_batch", [256, 1024])
    return {
        "lr": s.multistep(lr, milestones=[drop], gamma=0.1),
        "dense_lr": 1e-3,
        "batch_size": s.piecewise({0: 256, drop: batch}),
    }
