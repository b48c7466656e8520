"""Seconds per step of a chain that one process trains, and that two train as a gang; and whether their bits are equal.

    .venv/bin/python scripts/bench_elastic.py [--json FILE] [--models 32 256 768 resnet20] [--nodes 2 4] [--steps 30]
                                              [--repeats 3]

Models: MLPs with BatchNorm and dropout of some width, with few operations per parameter; ResNet-20 on random images of
32 x 32, with as many as in the papers' searches. Batch 128, SGD with momentum, one thread per process. One process and
the gang take turns; times are medians over turns.

whole             a step without virtual nodes, in one process
alone             a step of all virtual nodes in one process
gang              a step of two processes; its speed-up is alone / gang
estimated         what the gang estimates for one process
form, dissolve    seconds until a gang has met, its follower being at the state, and until it is dissolved

What a search gains by it: scripts/bench_gang_makespan.py.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from command_line import parser_of, write
from torch import nn
from torch.utils.data import TensorDataset

import hpstage.torch
from hpstage.checkpoints.state_tree import digest
from hpstage.cluster import malloc
from hpstage.training.trainables import as_trainable
from hpstage.workloads.resnet import resnet

BATCH, INPUTS, SAMPLES = 128, 128, 1024
RESNET = "resnet20"
TIMEOUT = 300.0


class Subject(hpstage.torch.TorchTrainable):
    device = "cpu"

    def __init__(self, name: str, nodes: int) -> None:
        self.name, self.virtual_nodes = name, nodes

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        if self.name == RESNET:
            return resnet(20)
        width = int(self.name)
        layers: list[nn.Module] = [nn.Linear(INPUTS, width)]
        for _ in range(3):
            layers += [nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width)]
        return nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, 10))

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"], momentum=0.9)

    def dataset(self) -> TensorDataset:
        shape = (3, 32, 32) if self.name == RESNET else (INPUTS,)
        generator = torch.Generator().manual_seed(0)
        return TensorDataset(torch.randn(SAMPLES, *shape, generator=generator), torch.arange(SAMPLES) % 10)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


HP = {"lr": 0.01, "batch_size": BATCH, "seed": 1}


def made(name: str, nodes: int) -> Any:
    trainable = as_trainable(Subject(name, nodes))
    trainable.setup(HP)
    return trainable


def follow() -> None:
    """Follow gangs, one for each line: the model, the number of nodes, a file with the state, and the address."""
    trainables: dict[str, Any] = {}
    for line in sys.stdin:
        name, nodes, file, address = line.split()
        trainable = trainables.setdefault(name + nodes, as_trainable(Subject(name, int(nodes))))
        trainable.setup(HP)
        with open(file, "rb") as stream:
            trainable.load_state_dict(pickle.load(stream))  # noqa: S301  # written by this script
        print("here", flush=True)
        trainable.follow(address, 1, 2, TIMEOUT)
        print(digest(trainable.state_dict()), flush=True)


def seconds(trainable: Any, start: int, count: int) -> float:
    began = time.perf_counter()
    for step in range(start, start + count):
        trainable.train(step, HP)
    return (time.perf_counter() - began) / count


def compare(
    name: str, nodes: int, options: argparse.Namespace, follower: subprocess.Popen[str], file: Path
) -> dict[str, Any]:
    assert follower.stdin is not None and follower.stdout is not None
    whole, alone, gang = made(name, 1), made(name, nodes), made(name, nodes)
    found: dict[str, list[float]] = {}
    is_equal, step = True, 0
    for trainable in (whole, alone, gang):
        seconds(trainable, 0, 3)
    step = 3
    for _ in range(options.repeats):
        with open(file, "wb") as stream:
            pickle.dump(gang.state_dict(), stream)
        turn = {"whole": seconds(whole, step, options.steps), "alone": seconds(alone, step, options.steps)}
        address = gang.open_gang("127.0.0.1")
        follower.stdin.write(f"{name} {nodes} {file} {address}\n")
        follower.stdin.flush()
        follower.stdout.readline()
        began = time.perf_counter()
        gang.lead(2, TIMEOUT)
        turn["form"] = time.perf_counter() - began
        gang.shared_seconds()
        turn["gang"] = seconds(gang, step, options.steps)
        turn["estimated"] = gang.shared_seconds() / options.steps
        began = time.perf_counter()
        gang.dismiss("")
        turn["dissolve"] = time.perf_counter() - began
        step += options.steps
        states = {digest(alone.state_dict()), digest(gang.state_dict()), follower.stdout.readline().strip()}
        is_equal = is_equal and len(states) == 1
        for key, value in turn.items():
            found.setdefault(key, []).append(value)
    medians = {key: statistics.median(values) for key, values in found.items()}
    return {"equal": is_equal, "speedup": medians["alone"] / medians["gang"], "medians": medians, "all": found}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["32", "256", "768", RESNET])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not malloc.ENVIRONMENT.items() <= os.environ.items():
        # As in training processes: the time in which the system gives memory, again and again, is not measured here.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **malloc.ENVIRONMENT})
    torch.set_num_threads(1)
    if options.follow:
        follow()
        return
    figures: dict[str, Any] = {}
    command = [sys.executable, __file__, "--follow"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as follower,
    ):
        for name, nodes in itertools.product(options.models, options.nodes):
            found = compare(name, nodes, options, follower, Path(folder, "state"))
            figures.setdefault(name, {})[str(nodes)] = found
            ms = {key: f"{value * 1000:.1f}" for key, value in found["medians"].items()}
            print(
                f"{name:>8}, {nodes} nodes: whole {ms['whole']} ms, alone {ms['alone']} ms, gang {ms['gang']} ms "
                f"({found['speedup']:.2f} x; estimated {ms['estimated']} ms alone), form {ms['form']} ms, dissolve "
                f"{ms['dissolve']} ms, {'equal' if found['equal'] else 'NOT EQUAL'}",
                flush=True,
            )
        assert follower.stdin is not None
        follower.stdin.close()
    is_equal = all(found["equal"] for of_model in figures.values() for found in of_model.values())
    write(options, {"options": vars(options), "elastic_equal": is_equal, "figures": figures})
    if not is_equal:
        sys.exit("the bits of a gang are not those of one process")


if __name__ == "__main__":
    main()
