"""An ordinary training script. tests/torch/ported_script.py is the same on a stage tree."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


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


def main() -> None:
    train_loader = DataLoader(Images(60, augment=True), batch_size=16, shuffle=True, num_workers=2, drop_last=True)
    test_loader = DataLoader(Images(40, augment=False), batch_size=20)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(4):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        print(epoch, accuracy(model, test_loader))  # noqa: T201


if __name__ == "__main__":
    main()
