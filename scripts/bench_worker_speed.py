"""How fast training steps run in hpstage's training processes, in Dask's own workers, and in plain processes.

All variants live side by side; in each round every variant trains one block of steps, alone, in a shuffled order.
A ratio compares a variant with ``plain`` within the same round, so that other load on the machine cancels out.

    python scripts/bench_worker_speed.py --model digits --workers 1 --json worker_speed.json
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import random
import resource
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from command_line import parser_of, write
from distributed import Client, LocalCluster

from hpstage.checkpoints import FolderCheckpoints
from hpstage.cluster import DaskExecutor, local_cluster, malloc
from hpstage.plan.facts import ChainId, NodeId, StateKey, WorkerId, to_numbers
from hpstage.plan.messages import Boundary, BoundaryReached, Chain, ChainEnded, Stage, WorkerJoined
from hpstage.schedule import Constant, Scalar

Block = dict[str, float]
"""Per step of a block: ``wall_ms``, ``cpu_ms`` (of this thread), ``process_ms`` (of all threads), page ``faults``."""

MODELS = {"digits": (16, 8, 300), "wide": (64, 24, 4)}
"""Channels, height and width of the images, steps per block."""

_steps: dict[str, Callable[[], None]] = {}  # of this process


def make_step(channels: int, size: int) -> Callable[[], None]:
    """One training step of a small CNN, batch 64."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * channels * size * size, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(1024, 1, size, size), torch.randint(0, 10, (1024,))
    order = torch.randperm(1024).view(16, 64)
    position = 0

    def step() -> None:
        nonlocal position
        rows = order[position % 16]
        position += 1
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def train_block(model: str) -> Block:
    """Train one block in this thread and say what a step of it cost."""
    channels, size, steps = MODELS[model]
    if model not in _steps:
        _steps[model] = make_step(channels, size)
        for _ in range(max(3, steps // 10)):
            _steps[model]()
    step = _steps[model]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    process, thread, wall = time.process_time(), time.thread_time(), time.perf_counter()
    for _ in range(steps):
        step()
    return {
        "wall_ms": 1e3 * (time.perf_counter() - wall) / steps,
        "cpu_ms": 1e3 * (time.thread_time() - thread) / steps,
        "process_ms": 1e3 * (time.process_time() - process) / steps,
        "faults": (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / steps,
    }


class Variant(Protocol):
    def run(self) -> list[Block]: ...


def _serve(pipe: Connection, model: str, in_thread: bool) -> None:
    """A plain process: trains a block for each ``True`` it reads, in its main thread or in one other."""

    def loop() -> None:
        while pipe.recv():
            pipe.send(train_block(model))

    if in_thread:
        thread = threading.Thread(target=loop)
        thread.start()
        thread.join()
    else:
        loop()


class Plain:
    """Plain processes; ``environment`` is set before they start."""

    def __init__(
        self, stack: ExitStack, model: str, workers: int, *, in_thread: bool = False, environment: dict[str, str]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        os.environ.update({"OMP_NUM_THREADS": "1", **environment})
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, model, in_thread))
            process.start()
            stack.callback(process.join)
            stack.callback(ours.send, False)
            self._pipes.append(ours)

    def run(self) -> list[Block]:
        for pipe in self._pipes:
            pipe.send(True)
        return [pipe.recv() for pipe in self._pipes]


class Dask:
    """One task on each worker of a cluster."""

    def __init__(self, stack: ExitStack, model: str, cluster: LocalCluster) -> None:
        stack.enter_context(cluster)
        self._client = stack.enter_context(Client(cluster, set_as_default=False))
        self._addresses = list(self._client.scheduler_info(n_workers=-1)["workers"])
        self._model = model

    def run(self) -> list[Block]:
        futures = [
            self._client.submit(train_block, self._model, workers=[address], pure=False) for address in self._addresses
        ]
        blocks: list[Block] = self._client.gather(futures)
        return blocks


class Blocks:
    """A trainable of which a step is a block, and what it cost the metrics."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.block: Block = {}

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        self.block = {}

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        self.block = train_block(self.model)

    def evaluate(self) -> Block:
        return self.block

    def state_dict(self) -> object:
        return {}

    def load_state_dict(self, state: object) -> None:
        pass


class Hpstage:
    """A chain of one step on each worker of a cluster, in the training processes of a DaskExecutor."""

    def __init__(self, stack: ExitStack, model: str, cluster: LocalCluster) -> None:
        stack.enter_context(cluster)
        client = stack.enter_context(Client(cluster, set_as_default=False))
        folder = Path(stack.enter_context(TemporaryDirectory()))
        self._executor = DaskExecutor(client)
        stack.callback(self._executor.close)
        self._executor.open(Blocks(model), FolderCheckpoints(folder, "w"))
        self._workers: list[WorkerId] = []
        while len(self._workers) < len(cluster.workers):
            self._workers += [report.worker for report in self._executor.wait(1.0) if isinstance(report, WorkerJoined)]
        self._started = 0

    def run(self) -> list[Block]:
        node = NodeId(0)
        boundary = Boundary(node, 1, StateKey("0" * 32), evaluate=True, keep=False)
        for worker in self._workers:
            self._started += 1
            stages = (Stage(node, 0, 1, {"seed": Constant(0)}, b""),)
            chain = Chain(ChainId(str(self._started)), None, {"seed": 0}, stages, (boundary,))
            self._executor.start(worker, chain)
        blocks: list[Block] = []
        left = len(self._workers)
        while left:
            for report in self._executor.wait(1.0):
                if isinstance(report, BoundaryReached):
                    assert report.reached.metrics is not None, report.failure
                    blocks.append(to_numbers(report.reached.metrics))
                left -= isinstance(report, ChainEnded)
        return blocks


def stock(workers: int) -> LocalCluster:
    """A LocalCluster as anybody starts it."""
    return LocalCluster(n_workers=workers, threads_per_worker=1, memory_limit=0, dashboard_address=":0")


def variants(stack: ExitStack, model: str, workers: int) -> dict[str, Callable[[], Variant]]:
    def plain(*, in_thread: bool = False, environment: dict[str, str] = {}) -> Variant:  # noqa: B006  # only read
        return Plain(stack, model, workers, in_thread=in_thread, environment=environment)

    return {
        "plain": plain,
        "plain, other thread": lambda: plain(in_thread=True),
        "plain, Dask's trim threshold": lambda: plain(environment={"MALLOC_TRIM_THRESHOLD_": "65536"}),
        "plain, malloc variables": lambda: plain(environment=malloc.ENVIRONMENT),
        "a task of Dask": lambda: Dask(stack, model, stock(workers)),
        "hpstage on a cluster of Dask": lambda: Hpstage(stack, model, stock(workers)),
        "hpstage local_cluster": lambda: Hpstage(stack, model, local_cluster(workers, gpus=0)),
    }


def summarise(rounds: dict[str, list[Block]]) -> dict[str, dict[str, Any]]:
    """Medians over rounds; ratios to ``plain`` in the same round, with their quartiles."""
    summary: dict[str, dict[str, Any]] = {}
    for name, blocks in rounds.items():
        summary[name] = {column: statistics.median(block[column] for block in blocks) for column in blocks[0]}
        for column in ("wall", "process"):
            ratios = [
                block[f"{column}_ms"] / base[f"{column}_ms"]
                for block, base in zip(blocks, rounds["plain"], strict=True)
            ]
            summary[name][f"{column}_ratio"] = statistics.median(ratios)
            # A single round has no quartiles.
            quartiles = statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else [ratios[0], ratios[0]]
            summary[name][f"{column}_ratio_quartiles"] = quartiles
    return summary


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="digits")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        runners: dict[str, Variant] = {}
        before = dict(os.environ)
        for name, make in variants(stack, arguments.model, arguments.workers).items():
            runners[name] = make()
            # Dask's nanny, too, sets its variables in this process, from which the next variant would have them.
            os.environ.clear()
            os.environ.update(before)
        for runner in runners.values():
            runner.run()
        order = list(runners)
        rounds: dict[str, list[Block]] = {name: [] for name in runners}
        shuffle = random.Random(0)
        for _ in range(arguments.rounds):
            shuffle.shuffle(order)
            for name in order:
                blocks = runners[name].run()
                rounds[name].append({k: statistics.mean(block[k] for block in blocks) for k in blocks[0]})
    summary = summarise(rounds)
    print(f"{'':30} {'wall ms':>8} {'ratio':>6} {'quartiles':>12} {'cpu ms':>8} {'ratio':>6} {'faults':>8}")
    for name, row in summary.items():
        low, high = row["wall_ratio_quartiles"]
        print(
            f"{name:30} {row['wall_ms']:8.3f} {row['wall_ratio']:6.2f}  {low:5.2f}-{high:5.2f} "
            f"{row['process_ms']:8.3f} {row['process_ratio']:6.2f} {row['faults']:8.1f}"
        )
    about = {"machine": platform.platform(), "cores": os.cpu_count(), **vars(arguments)}
    write(arguments, {"about": about, "variants": summary})


if __name__ == "__main__":
    main()
