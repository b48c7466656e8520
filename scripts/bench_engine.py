"""What stacking sibling models saves: seconds per member and step against eager training, by model, batch and number.

All variants live side by side; in each round every variant trains one block of steps, in a shuffled order, and ratios
are taken within a round, so that other load on the machine cancels out. Seconds are of this thread.

    python scripts/bench_engine.py --json engine.json
    python scripts/bench_engine.py --models mlp small_cnn --batches 32 --widths 1 8 24
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpstage.torch import TorchTrainable
from hpstage.torch.backends.stacked import Builder, Bundle
from hpstage.training.randomness import rekey
from hpstage.workloads.gpt import GPT
from hpstage.workloads.resnet import resnet

CPU = torch.device("cpu")


class Images(TorchTrainable):
    """A classifier of made-up images under SGD with momentum."""

    device = "cpu"
    shape = (1, 8, 8)

    def __init__(self, build: Callable[[], nn.Module], shape: tuple[int, int, int] = (1, 8, 8)) -> None:
        self.build, self.shape = build, shape

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return self.build()

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def dataset(self) -> Any:
        raise NotImplementedError("batches are made up")

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {}

    def batch(self, generator: torch.Generator, size: int) -> Any:
        return torch.randn(size, *self.shape, generator=generator), torch.randint(10, (size,), generator=generator)


class Text(Images):
    """A small GPT under AdamW, its gradients clipped."""

    block = 32

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
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
    """One way to train ``width`` members, each in its own sequence of batches and random numbers."""

    def __init__(self, subject: Images, builder: Builder | None, width: int, size: int) -> None:
        self.subject, self.width, self.taken = subject, width, 0
        self.pairs = []
        for number in range(width):
            torch.manual_seed(number)
            model = subject.model({})
            self.pairs.append((model, subject.optimizer(model, {})))
        self.batches = [subject.batch(torch.Generator().manual_seed(number), size) for number in range(width)]
        self.bundle = None if builder is None else Bundle(builder)
        self.members = [] if self.bundle is None else [self.bundle.join(*pair) for pair in self.pairs]

    def train(self, steps: int) -> float:
        """Return seconds per member and step."""
        begin = time.thread_time()
        for _ in range(steps):
            self.taken += 1
            for number in range(self.width):
                rekey(number, self.taken)
                if self.bundle is None:
                    loss: Any = self.subject.update(*self.pairs[number], self.batches[number])
                    loss.item()
                else:
                    self.members[number].stream = torch.get_rng_state()
            if self.bundle is not None:
                losses = self.bundle.step(self.batches, [{}] * self.width)
                assert losses is not None
                losses.tolist()
        return (time.thread_time() - begin) / steps / self.width

    def weights(self) -> list[list[Tensor]]:
        if self.bundle is not None:
            for member in self.members:
                self.bundle.sync(member)
        return [[tensor.clone() for tensor in model.state_dict().values()] for model, _ in self.pairs]


def equal(some: list[list[Tensor]], others: list[list[Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for mine, its in zip(some, others, strict=False) for a, b in zip(mine, its, strict=True)
    )


def measure(name: str, size: int, widths: list[int], rounds: int, seconds: float) -> dict[str, Any]:
    """Measure a model at a batch size; blocks take about ``seconds``."""
    subject = SUBJECTS[name]()
    builder = Builder(subject, CPU)
    eager = Side(subject, None, 1, size)
    alone = [Side(subject, builder, 1, size)]
    sides = {width: Side(subject, builder, width, size) for width in widths}
    first = {width: side.weights() for width, side in sides.items() if side.train(3)}
    reference = alone[0]
    reference.train(3)
    eager.train(3)
    invariant = all(equal(weights[:1], reference.weights()) for weights in first.values())
    like_eager = equal(eager.weights(), reference.weights())
    each = eager.train(2)
    ratios: dict[int, list[float]] = {width: [] for width in widths}
    spent = []
    for _ in range(rounds):
        base = eager.train(max(1, round(seconds / each)))
        spent.append(base)
        for width in random.sample(widths, len(widths)):
            ratios[width].append(sides[width].train(max(1, round(seconds / each / width))) / base)
    found = {width: statistics.median(values) for width, values in ratios.items()}
    best = min(found, key=lambda width: found[width])
    return {
        "model": name,
        "batch_size": size,
        "eager_seconds": statistics.median(spent),
        "fused_ratio": found[best],
        "width_that_pays": best if found[best] < 1 else None,
        "ratios": found,
        "k_invariant": invariant,
        "equals_eager": like_eager,
        "build_seconds": builder.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 128], metavar="SIZE")
    parser.add_argument("--widths", nargs="+", type=int, default=[1, 2, 4, 8, 16, 24], metavar="K")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.2, help="of a block (default: 0.2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.models:
        for size in options.batches:
            row = measure(name, size, options.widths, options.rounds, options.seconds)
            rows.append(row)
            ratios = "  ".join(f"{width}: {ratio:.2f}" for width, ratio in row["ratios"].items())
            print(
                f"{name:10} batch {size:4}  eager {1e3 * row['eager_seconds']:7.2f} ms  {ratios}  "
                f"k_invariant {row['k_invariant']}  equals_eager {row['equals_eager']}  "
                f"built in {row['build_seconds']:.1f} s",
                flush=True,
            )
    if options.json is not None:
        about = {
            "torch": torch.__version__,
            "machine": platform.machine(),
            "isa": torch.backends.cpu.get_cpu_capability(),
        }
        options.json.write_text(json.dumps({**about, "stacked": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
