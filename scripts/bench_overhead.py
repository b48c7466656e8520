"""Seconds per stage outside the user's code: claim, load, publish, report.

    .venv/bin/python scripts/bench_overhead.py [--json FILE] [--stages 60] [--repeats 5] [--megabytes 50]

Measured from outside, on one Dask worker: the wall time of a search minus the seconds spent in the user's own
``train`` and ``evaluate``, over its stages.

empty_stage_ms           a stage on a line of its own, fresh, with an empty state (one Dask task each)
boundary_ms              a boundary inside a chain, with an empty state (no task of its own)
fork_live_ms             forking a state of --megabytes from the worker's memory: load alone
fork_disk_ms             forking it from disk: load alone
publish_ms               publishing such a state: save alone
fork_live_stage_ms       a whole stage (claim, load, publish, report) of such a state, forked from memory
fork_disk_stage_ms       the same, forked from disk
write_ms                 writing the same bytes to a new file and nothing else, for comparison
torch_save_ms, torch_load_ms   the same tensors by torch.save and torch.load, for comparison
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import optuna
import torch

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints import FolderCheckpoints
from hpstage.cluster import DaskExecutor
from hpstage.events import StateKey, StateReached


class Still:
    """Trains nothing; its state is ``megabytes`` of parameters and a counter."""

    version = "1"

    def __init__(self, megabytes: float) -> None:
        self.megabytes = megabytes

    def setup(self, hp: dict[str, object]) -> None:
        size = max(1, int(self.megabytes * 1e6 / 4 / 20)) if self.megabytes else 0
        self.tensors = {f"layer{i}.weight": torch.zeros(size) for i in range(20)} if size else {}
        self.count = 0

    def train(self, step: int, hp: dict[str, object]) -> None:
        self.count += 1

    def evaluate(self) -> dict[str, float]:
        return {"value": float(self.count)}

    def state_dict(self) -> object:
        return {"tensors": self.tensors, "count": self.count}

    def load_state_dict(self, state: dict[str, object]) -> None:
        for name, tensor in state["tensors"].items():
            self.tensors[name].copy_(tensor)
        self.count = state["count"]


def search(
    megabytes: float, space: Callable[[optuna.Trial], dict[str, object]], n_trials: int, steps: int, folder: Path
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
        executor=DaskExecutor(n_workers=1),
        store=folder,
    )
    reached = [fact for fact in result.journal if isinstance(fact, StateReached)]
    return reached[-1].at - reached[0].at, reached


def lines(trial: optuna.Trial) -> dict[str, object]:
    """Every trial on a line of its own from the first step on."""
    return {"a": trial.number}


def forks(trial: optuna.Trial) -> dict[str, object]:
    """Every trial forks the same state after the first step."""
    return {"a": s.piecewise({0: -1, 1: trial.number})}


def milliseconds(values: list[float]) -> float:
    return 1000 * statistics.median(values)


def once(stages: int, megabytes: float, few: int) -> dict[str, float]:
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="hpstage-bench-") as root:
        wall, reached = search(0.0, lines, stages, 1, Path(root) / "empty")
        inside = sum(r.train_seconds + r.evaluate_seconds for r in reached[1:])
        found["empty_stage_ms"] = 1000 * (wall - inside) / (len(reached) - 1)
        wall, reached = search(0.0, staircase, 40, 40, Path(root) / "chain")
        spine = [r for r in reached if r.node == 0][1:]  # the trunk
        found["boundary_ms"] = milliseconds([r.save_seconds + r.evaluate_seconds for r in spine])
        wall, reached = search(megabytes, forks, few + 1, 2, Path(root) / "live")
        ends = [r for r in reached if r.step == 2]
        live = [r for r in ends if r.source == "live"]
        found["fork_live_ms"] = milliseconds([r.load_seconds for r in live])
        found["publish_ms"] = milliseconds([r.save_seconds for r in ends])
        gaps = [b.at - a.at - b.train_seconds - b.evaluate_seconds for a, b in pairwise(ends)]
        found["fork_live_stage_ms"] = milliseconds(gaps)
        found |= disk(Path(root), megabytes, few)
        found["fork_disk_stage_ms"] = found["fork_live_stage_ms"] - found["fork_live_ms"] + found["fork_disk_ms"]
    return found


def staircase(trial: optuna.Trial) -> dict[str, object]:
    """Trial i leaves the trunk after step i + 1: one boundary at every step of the trunk."""
    return {"a": s.piecewise({0: -1, trial.number + 1: trial.number}) if trial.number < 39 else -1}


def disk(root: Path, megabytes: float, repeats: int) -> dict[str, float]:
    """Loading into a set-up trainable from disk, against torch.save and torch.load of the same tensors."""
    trainable = Still(megabytes)
    trainable.setup({})
    store = FolderCheckpoints(root / "disk", "bench")
    key = StateKey("0" * 32)
    store.save(key, trainable.state_dict(), step=1, parent=None)
    loads, theirs_save, theirs_load, writes = [], [], [], []
    for index in range(repeats):
        began = time.perf_counter()
        with open(root / f"bytes-{index}", "wb") as file:
            for tensor in trainable.tensors.values():
                file.write(memoryview(tensor.numpy()))
        writes.append(time.perf_counter() - began)
        began = time.perf_counter()
        trainable.setup({})
        trainable.load_state_dict(store.load(key))
        loads.append(time.perf_counter() - began)
        began = time.perf_counter()
        torch.save(trainable.state_dict(), root / "state.pt")
        theirs_save.append(time.perf_counter() - began)
        began = time.perf_counter()
        trainable.setup({})
        trainable.load_state_dict(torch.load(root / "state.pt", weights_only=True))
        theirs_load.append(time.perf_counter() - began)
    return {
        "fork_disk_ms": milliseconds(loads),
        "write_ms": milliseconds(writes),
        "torch_save_ms": milliseconds(theirs_save),
        "torch_load_ms": milliseconds(theirs_load),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--stages", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=50.0)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    runs = [once(options.stages, options.megabytes, 8) for _ in range(options.repeats)]
    table = {name: sorted(run[name] for run in runs) for name in runs[0]}
    print(f"{'':<22} {'median':>9} {'min':>9} {'max':>9}   ms, {options.repeats} runs, {options.megabytes:g} MB")
    for name, values in table.items():
        print(f"{name:<22} {statistics.median(values):>9.2f} {values[0]:>9.2f} {values[-1]:>9.2f}")
    if options.json is not None:
        figures: dict[str, object] = {name: statistics.median(values) for name, values in table.items()}
        figures |= {"spread": {name: [values[0], values[-1]] for name, values in table.items()}}
        figures |= {"megabytes": options.megabytes, "stages": options.stages, "repeats": options.repeats}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
