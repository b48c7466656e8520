"""Seconds per stage outside the user's code: claim, load, publish, report.

    .venv/bin/python scripts/bench_overhead.py [--json FILE] [--stages 60] [--forks 20] [--repeats 5] [--megabytes 50]

Measured from outside, on one Dask worker: the wall time of a search minus the seconds spent in the user's own
``train`` and ``evaluate``, over its stages. Times of forks are medians of --forks: the first three of a search are
verified in a copy of its process, and take some three times as long.

empty_stage_ms           a stage on a line of its own, fresh, with an empty state (one Dask task each)
boundary_ms              a boundary inside a chain, with an empty state (no task of its own)
fork_live_ms             forking a state of --megabytes from the worker's memory: load alone
fork_disk_ms             forking it from disk, on a worker that never held it: load alone
publish_ms               publishing such a state: save alone
fork_live_stage_ms       a whole stage (claim, load, publish, report) of such a state, forked from memory
fork_disk_stage_ms       the same, forked from disk
write_ms                 writing the same bytes to a new file and nothing else, for comparison
torch_save_ms, torch_load_ms   the same tensors by torch.save and torch.load (with the copy into the model)
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import optuna
import torch
from command_line import parser_of, shown, write
from distributed import LocalCluster

import hpstage
from hpstage import schedule as s
from hpstage.plan.facts import StateReached


class Still:
    """Its state is ``megabytes`` of parameters and a counter. Each trial's parameters have other values, since what
    states have in common is stored once."""

    version = "1"
    stateless = ("tensors",)  # else they would be taken away before each setup, and made again

    def __init__(self, megabytes: float) -> None:
        self.megabytes = megabytes

    def setup(self, hp: dict[str, object]) -> None:
        if not hasattr(self, "tensors"):  # made once: making them is the user's cost, and would hide ours
            size = int(self.megabytes * 1e6 / 4 / 20)
            self.tensors = {f"layer{i}.weight": torch.zeros(size) for i in range(20)} if size else {}
        self.count = 0

    def train(self, step: int, hp: dict[str, float]) -> None:
        self.count += 1
        for tensor in self.tensors.values():
            tensor.add_(hp["a"] + 2)

    def evaluate(self) -> dict[str, float]:
        return {"value": float(self.count)}

    def state_dict(self) -> object:
        return {"tensors": self.tensors, "count": self.count}

    def load_state_dict(self, state: dict[str, object]) -> None:
        for name, tensor in state["tensors"].items():
            self.tensors[name].copy_(tensor)
        self.count = state["count"]


def search(
    cluster: LocalCluster,
    megabytes: float,
    space: Callable[[optuna.Trial], dict[str, object]],
    n_trials: int,
    steps: int,
    folder: Path,
) -> tuple[float, list[StateReached]]:
    """Seconds from the first to the last report of a search on one worker, and its reports."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    result = hpstage.optimize(
        study,
        Still(megabytes),
        space,
        metric="value",
        steps=steps,
        n_trials=n_trials,
        executor=cluster,
        store=folder,
    )
    reached = [fact for fact in result.journal if isinstance(fact, StateReached)]
    return reached[-1].at - reached[0].at, reached


def lines(trial: optuna.Trial) -> dict[str, object]:
    """Every trial on a line of its own from the first step on."""
    return {"a": trial.number}


def forks_from(first: int) -> Callable[[optuna.Trial], dict[str, object]]:
    """Every trial forks the same state after the first step."""
    return lambda trial: {"a": s.piecewise({0: -1, 1: first + trial.number})}


def milliseconds(values: list[float]) -> float:
    """Return the median; NaN where there was none: on a busy machine, states may have left the memory."""
    return 1000 * statistics.median(values) if values else math.nan


def once(cluster: LocalCluster, stages: int, megabytes: float, few: int) -> dict[str, float]:
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="hpstage-bench-") as root:
        wall, reached = search(cluster, 0.0, lines, stages, 1, Path(root) / "empty")
        inside = sum(r.train_seconds + r.evaluate_seconds for r in reached[1:])
        found["empty_stage_ms"] = 1000 * (wall - inside) / (len(reached) - 1)
        wall, reached = search(cluster, 0.0, staircase, 40, 40, Path(root) / "chain")
        spine = [r for r in reached if r.node == 0][1:]  # the trunk
        found["boundary_ms"] = milliseconds([r.save_seconds + r.evaluate_seconds for r in spine])
        for source, first in (("live", 0), ("disk", 100)):
            # Each search trains in a new process: that of the second, on the same store, holds nothing live.
            _, reached = search(cluster, megabytes, forks_from(first), few + 1, 2, Path(root) / "forks")
            ends = [r for r in reached if r.step == 2 and r.source == source]
            found[f"fork_{source}_ms"] = milliseconds([r.load_seconds for r in ends])
            gaps = [b.at - a.at - b.train_seconds - b.evaluate_seconds for a, b in pairwise(reached) if b in ends]
            found[f"fork_{source}_stage_ms"] = milliseconds(gaps)
            found["publish_ms"] = milliseconds([r.save_seconds for r in ends])
        found |= files(Path(root), megabytes, few)
    return found


def staircase(trial: optuna.Trial) -> dict[str, object]:
    """Trial i leaves the trunk after step i + 1: one boundary at every step of the trunk."""
    return {"a": s.piecewise({0: -1, trial.number + 1: trial.number}) if trial.number < 39 else -1}


def files(root: Path, megabytes: float, repeats: int) -> dict[str, float]:
    """The same tensors written, saved and loaded without hpstage."""
    trainable = Still(megabytes)
    trainable.setup({})
    taken: dict[str, list[float]] = {"write_ms": [], "torch_save_ms": [], "torch_load_ms": []}
    for index in range(repeats):
        marks = [time.perf_counter()]
        with open(root / f"bytes-{index}", "wb") as file:
            for tensor in trainable.tensors.values():
                file.write(memoryview(tensor.numpy()))
        marks.append(time.perf_counter())
        torch.save(trainable.state_dict(), root / f"state-{index}.pt")
        marks.append(time.perf_counter())
        trainable.load_state_dict(torch.load(root / f"state-{index}.pt", weights_only=True))
        marks.append(time.perf_counter())
        for values, (start, stop) in zip(taken.values(), pairwise(marks), strict=True):
            values.append(stop - start)
    return {name: milliseconds(values) for name, values in taken.items()}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--stages", type=int, default=60)
    parser.add_argument("--forks", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=50.0)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    with hpstage.local_cluster(1) as cluster:
        runs = [once(cluster, options.stages, options.megabytes, options.forks) for _ in range(options.repeats)]
    table = {name: [run[name] for run in runs] for name in runs[0]}
    figures = shown(table, f"ms, {options.repeats} runs, {options.megabytes:g} MB")
    figures |= {
        "megabytes": options.megabytes,
        "stages": options.stages,
        "forks": options.forks,
        "repeats": options.repeats,
    }
    write(options, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
