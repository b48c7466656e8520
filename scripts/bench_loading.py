"""Milliseconds per step where loading costs most: an ordinary loop over a DataLoader, and hpstage.

    .venv/bin/python scripts/bench_loading.py [--json FILE] [--workers 8] [--milliseconds 2] [--steps 60] [--repeats 5]

A data set sleeps --milliseconds for each sample; the batch size is 64. All ways take turns in one process, each with
processes of its own, and are compared within a turn: the ratios are medians over turns, (least to most).

raw               a loop over a DataLoader with --workers
class             the same as a TorchTrainable whose dataset() returns that DataLoader
function          the same as a function that loops over run.batches(loader)
one process       the class with num_workers = 0, for fewer steps
fork              the first step after a fork at another position, in place of which one reads ahead, for the class
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from command_line import parser_of, write
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hpstage
import hpstage.torch
from hpstage.checkpoints.state_tree import clone
from hpstage.training.trainables import as_trainable

BATCH = 64
HP = {"lr": 0.01, "seed": 1}
AHEAD = 3
"""Rounds of batches that are trained before the clock starts, so that what was read ahead before is used up."""


class Slow(Dataset[Any]):
    def __init__(self, milliseconds: float) -> None:
        self.seconds = milliseconds / 1000

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return torch.full((1, 28, 28), float(index % 7)), index % 10


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def loader_of(options: argparse.Namespace, workers: int) -> DataLoader[Any]:
    return DataLoader(
        Slow(options.milliseconds), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )


class Trained(hpstage.torch.TorchTrainable):
    device = "cpu"
    data_version = "1"

    def __init__(self, options: argparse.Namespace, workers: int) -> None:
        self.options, self.workers = options, workers

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return network()

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"])

    def dataset(self) -> DataLoader[Any]:
        return loader_of(self.options, self.workers)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"zero": 0.0}


def function_of(options: argparse.Namespace) -> Callable[[hpstage.Run], None]:
    def train(run: hpstage.Run) -> None:
        loader = loader_of(options, options.workers)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=run.hp["lr"])  # type: ignore[arg-type]
        run.attach(model=model, optimizer=optimizer)
        for x, y in run.batches(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if run.wants_report:
                run.report(zero=0.0)

    return train


def raw(options: argparse.Namespace) -> Iterator[None]:
    loader = loader_of(options, options.workers)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=HP["lr"])
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield


def steps_of(subject: object) -> tuple[Any, Callable[[], None]]:
    trainable = as_trainable(subject)
    trainable.setup(HP)
    count = iter(range(1 << 30))
    return trainable, lambda: trainable.train(next(count), HP)


def timed(step: Callable[[], object], steps: int) -> float:
    """Return milliseconds per step."""
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began) / steps * 1000


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    logging.getLogger("hpstage").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    torch.set_num_threads(1)
    loop = raw(options)
    made, by_class = steps_of(Trained(options, options.workers))
    function, by_function = steps_of(function_of(options))
    single, alone = steps_of(Trained(options, 0))
    ways: dict[str, Callable[[], object]] = {"raw": lambda: next(loop), "class": by_class, "function": by_function}
    by_class()
    state = clone(made.state_dict())
    found: dict[str, list[float]] = {name: [] for name in (*ways, "one process", "fork")}
    for turn in range(options.repeats):
        order = list(ways)[turn % 3 :] + list(ways)[: turn % 3]
        for name in order:
            timed(ways[name], AHEAD * options.workers)
            found[name].append(timed(ways[name], options.steps))
        found["one process"].append(timed(alone, max(3, options.steps // 12)))
        made.setup(HP)
        made.load_state_dict(state)
        found["fork"].append(timed(by_class, 1))
    for trainable in (made, function, single):
        trainable.close()
    figures = {}
    for name, values in found.items():
        ratios = [value / base for value, base in zip(values, found["raw"], strict=True)]
        figures[name] = {
            "milliseconds": statistics.median(values),
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
        print(
            f"{name:12} {figures[name]['milliseconds']:8.1f} ms per step, {figures[name]['ratio']:.2f} x raw "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
    write(options, {"options": vars(options), "figures": figures, "all": found})


if __name__ == "__main__":
    main()
