"""Small models, and ways to train several of them side by side, for the scripts that measure the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import TensorDataset

from hpstage.torch import TorchTrainable
from hpstage.torch.backends.stacked import Builder, Bundle
from hpstage.torch.backends.stacked.streams import generator_of
from hpstage.training.randomness import rekey
from hpstage.workloads.gpt import GPT
from hpstage.workloads.resnet import resnet

CPU = torch.device("cpu")


class Images(TorchTrainable):
    """A classifier of made-up images under SGD with momentum."""

    def __init__(self, build: Callable[[], nn.Module], shape: tuple[int, int, int] = (1, 8, 8)) -> None:
        self.build, self.shape = build, shape
        self.device = "cpu"

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return self.build()

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp.get("lr", 0.05), momentum=0.9, weight_decay=5e-4)

    def dataset(self) -> TensorDataset:
        made = self.batch(torch.Generator().manual_seed(0), 256)
        return TensorDataset(*(made if isinstance(made, tuple) else (made,)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        made = tree_map(lambda tensor: tensor.to(self.device), self.batch(torch.Generator().manual_seed(1), 64))
        return {"loss": self.loss(model, made).item()}

    def batch(self, generator: torch.Generator, size: int) -> Any:
        return torch.randn(size, *self.shape, generator=generator), torch.randint(10, (size,), generator=generator)


class Text(Images):
    """A small GPT under AdamW, its gradients clipped."""

    block = 32

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=hp.get("lr", 1e-3), weight_decay=0.1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        batch = batch if isinstance(batch, Tensor) else batch[0]  # of a TensorDataset: a tuple of one
        return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    def batch(self, generator: torch.Generator, size: int) -> Any:
        return torch.randint(256, (size, self.block + 1), generator=generator)


def mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def cnn(first: int, second: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, first, 3, padding=1), nn.BatchNorm2d(first), nn.ReLU()),
        *(nn.Conv2d(first, second, 3, padding=1), nn.BatchNorm2d(second), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(second * 16, 10)),
    )


SUBJECTS: dict[str, Callable[[], Images]] = {
    "mlp": lambda: Images(mlp),
    "small_cnn": lambda: Images(lambda: cnn(8, 16)),
    "demo_cnn": lambda: Images(lambda: cnn(16, 32)),
    "resnet20": lambda: Images(lambda: resnet(20, 8), (3, 16, 16)),
    "gpt": lambda: Text(lambda: GPT(layers=2, heads=2, width=32, block=32, dropout=0.1)),
}


class Side:
    """One way to train ``width`` members on a device, each in its own sequence of batches and random numbers.

    Args:
        builder: of the programs by which they are trained as one; without it, each is trained by ``update()``.
        size: of a batch.
    """

    def __init__(
        self, subject: Images, builder: Builder | None, width: int, size: int, device: torch.device = CPU
    ) -> None:
        self.subject, self.width, self.device, self.taken = subject, width, device, 0
        self.pairs = []
        for number in range(width):
            torch.manual_seed(number)
            model = subject.model({}).to(device)
            self.pairs.append((model, subject.optimizer(model, {})))
        made = [subject.batch(torch.Generator().manual_seed(number), size) for number in range(width)]
        self.batches = [tree_map(lambda tensor: tensor.to(device), batch) for batch in made]
        self.bundle = None if builder is None else Bundle(builder)
        self.members = [] if self.bundle is None else [self.bundle.join(*pair) for pair in self.pairs]

    def train(self, steps: int) -> float:
        """Return seconds per member and step."""
        begin = now(self.device)
        for _ in range(steps):
            self.taken += 1
            for number in range(self.width):
                rekey(number, self.taken)
                if self.bundle is None:
                    loss: Any = self.subject.update(*self.pairs[number], self.batches[number])
                    loss.item()
                else:
                    self.members[number].stream = generator_of(self.device).get_state()
            if self.bundle is not None:
                losses = self.bundle.step(self.batches, [{}] * self.width)
                assert losses is not None
                losses.tolist()
        return (now(self.device) - begin) / steps / self.width

    def weights(self) -> list[list[Tensor]]:
        if self.bundle is not None:
            for member in self.members:
                self.bundle.sync(member)
        return [[tensor.clone() for tensor in model.state_dict().values()] for model, _ in self.pairs]


def now(device: torch.device) -> float:
    """Return seconds: of this thread on a CPU, else as they pass, once the device has done what it was given."""
    if device.type == "cpu":
        return time.thread_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def equal(some: list[list[Tensor]], others: list[list[Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for mine, its in zip(some, others, strict=False) for a, b in zip(mine, its, strict=True)
    )
