"""The script of tests/torch/ordinary_script.py on a stage tree."""

from __future__ import annotations

from typing import Any

import optuna
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hpstage
from hpstage import schedule as s


class Images(Dataset[Any]):
    def __init__(self, count: int, augment: bool) -> None:
        generator = torch.Generator().manual_seed(count)
        self.y = torch.arange(count) % 4
        self.x = torch.randn(count, 1, 8, 8, generator=generator) + self.y[:, None, None, None]
        self.augment = augment

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        if self.augment:
            x = x.flip(-1) if torch.rand(()) < 0.5 else x
            x = x + 0.1 * torch.randn(x.shape)
        return x, self.y[index]


def accuracy(model: nn.Module, loader: DataLoader[Any]) -> float:
    model.eval()
    right, count = 0, 0
    with torch.no_grad():
        for x, y in loader:
            right += int((model(x).argmax(1) == y).sum())
            count += len(y)
    return right / count


def train(run: hpstage.Run) -> None:
    train_loader = DataLoader(Images(60, augment=True), batch_size=16, shuffle=True, num_workers=2, drop_last=True)
    test_loader = DataLoader(Images(40, augment=False), batch_size=20)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=run.hp["lr"], momentum=0.9)
    run.attach(model=model, optimizer=optimizer)
    for _ in run.steps():
        model.train()
        for x, y in run.batches(train_loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if run.wants_report:
            run.report(accuracy=accuracy(model, test_loader))


def space(trial: optuna.Trial) -> dict[str, object]:
    return {"lr": s.multistep(0.1, milestones=[trial.suggest_categorical("drop", [1, 2, 3])], gamma=0.1)}


if __name__ == "__main__":
    study = optuna.create_study(direction="maximize")
    result = hpstage.optimize(study, train, space, metric="accuracy", steps=4, n_trials=3)
    print(result.best_trial)  # noqa: T201
