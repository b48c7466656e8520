"""What stacking siblings saves in a whole search: 48 trials of a small CNN on scikit-learn's digits, as a stage tree.

The same search is trained merged (``numerics = "eager"``) and as ``"auto"`` chooses, in turn, on local Dask workers;
worker-seconds of the two are compared within a round. At a batch size of 32 fusing pays, at 128 it does not. Seconds of
measuring are told apart: no trial pays for them. Metrics must not depend on how many are trained as one.

    python scripts/bench_fused_search.py --json fused.json
    python scripts/bench_fused_search.py --steps 300 --rounds 1 --inline
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import hpstage
from hpstage import schedule as s
from hpstage.cluster import DaskExecutor
from hpstage.plan.log import NUMERICS, read_header
from hpstage.store import MemoryJournal


class SmallCnn(hpstage.torch.TorchTrainable):
    """8 and 16 channels; a step is a batch."""

    device = "cpu"

    def __init__(self, numerics: str, stacked: int) -> None:
        self.numerics, self.max_stacked = numerics, stacked

    def dataset(self) -> TensorDataset:
        images, labels = load_digits(return_X_y=True)
        x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
        self.test = x[1437:], y[1437:]
        return TensorDataset(x[:1437], y[:1437])

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)),
        )

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"], momentum=hp["momentum"])

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        x, y = self.test
        return {"accuracy": (model(x).argmax(1) == y).double().mean().item()}


GRID: dict[str, list[Any]] = {
    "lr": [0.1, 0.05, 0.02],
    "drop": [0.3, 0.5, 0.6, 0.8],
    "gamma": [0.1, 0.3],
    "late": [0, 1],
}


class Timed:
    """An executor that tells how long it has measured."""

    def __init__(self) -> None:
        self.measured = 0.0

    def timed(self, measure: Callable[[], dict[str, float] | None]) -> dict[str, float] | None:
        begin = time.perf_counter()
        found = measure()
        self.measured += time.perf_counter() - begin
        return found


class Workers(DaskExecutor, Timed):
    def __init__(self, workers: int) -> None:
        DaskExecutor.__init__(self, n_workers=workers, gpus=0)
        Timed.__init__(self)

    def measure(self, initial: Mapping[str, Any]) -> dict[str, float] | None:
        return self.timed(lambda: DaskExecutor.measure(self, initial))


class Here(hpstage.InlineExecutor, Timed):
    def __init__(self) -> None:
        hpstage.InlineExecutor.__init__(self)
        Timed.__init__(self)

    def measure(self, initial: Mapping[str, Any]) -> dict[str, float] | None:
        return self.timed(lambda: hpstage.InlineExecutor.measure(self, initial))


def search(numerics: str, stacked: int, steps: int, batch: int, workers: int) -> dict[str, Any]:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        lr, drop = trial.suggest_categorical("lr", GRID["lr"]), trial.suggest_categorical("drop", GRID["drop"])
        gamma, late = trial.suggest_categorical("gamma", GRID["gamma"]), trial.suggest_categorical("late", GRID["late"])
        milestones = [round(drop * steps), *([round(0.9 * steps)] if late else [])]
        return {"lr": s.multistep(lr, milestones, gamma), "momentum": 0.9, "batch_size": batch}

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler(GRID, seed=0))
    executor = Workers(workers) if workers else Here()
    begin = time.perf_counter()
    result = hpstage.optimize(
        study,
        SmallCnn(numerics, stacked),
        space,
        metric="accuracy",
        steps=steps,
        n_trials=48,
        executor=executor,
        store=(journal := MemoryJournal()),
    )
    savings, times = result.savings, result.plan.step_times
    return {
        "asked": numerics,
        "numerics": read_header(journal).described[NUMERICS],
        "at_a_time": 1 if times is None else times.best,
        "step_seconds": [] if times is None else times.seconds,
        "seconds": savings.worker_seconds,
        "train_seconds": savings.train_seconds,
        "saved_by_fusing": savings.fused_seconds,
        "measure_seconds": executor.measured,
        "makespan": savings.makespan,
        "wall": time.perf_counter() - begin,
        "steps_trained": savings.steps_trained,
        "steps_unique": savings.steps_unique,
        "merge_rate": savings.merge_rate,
        "values": {json.dumps(trial.params, sort_keys=True): trial.value for trial in study.trials},
    }


def compare(options: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Return the figures of one batch size."""
    workers = 0 if options.inline else options.workers
    rounds = []
    for number in range(options.rounds):
        ways: list[tuple[str, int]] = [("eager", 1), ("auto", options.stacked)]
        done = {way[0]: search(*way, options.steps, batch, workers) for way in ways[:: 1 - 2 * (number % 2)]}
        rounds.append(done)
        for way in done.values():
            print(
                f"batch {batch:3} round {number}  {way['asked']:5} {way['numerics']:10} x {way['at_a_time']}  "
                f"{way['seconds']:7.1f} worker-s  makespan {way['makespan']:6.1f} s  measuring "
                f"{way['measure_seconds']:4.1f} s  {way['steps_trained']:,} of {way['steps_unique']:,} steps",
                flush=True,
            )
    stacked = [way["auto"]["values"] for way in rounds if way["auto"]["numerics"].startswith("stacked")]
    alike = [*stacked, search("stacked", 3, options.steps, batch, 0)["values"]] if stacked else []
    figures = {
        "merge_seconds": statistics.median(done["eager"]["seconds"] for done in rounds),
        "fused_seconds": statistics.median(done["auto"]["seconds"] for done in rounds),
        "fused_ratio": statistics.median(done["auto"]["seconds"] / done["eager"]["seconds"] for done in rounds),
        "makespan_ratio": statistics.median(done["auto"]["makespan"] / done["eager"]["makespan"] for done in rounds),
        "measure_seconds": statistics.median(done["auto"]["measure_seconds"] for done in rounds),
        "chosen": [done["auto"]["numerics"] for done in rounds],
        "k_invariant": all(other == alike[0] for other in alike),
        "rounds": rounds,
    }
    print(
        f"batch {batch}: fused / merged worker-seconds {figures['fused_ratio']:.2f}, makespan "
        f"{figures['makespan_ratio']:.2f}, {', '.join(figures['chosen'])}; values depend on K: "
        f"{not figures['k_invariant']}"
    )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--stacked", type=int, default=8, metavar="K", help="siblings as one at most (default: 8)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--inline", action="store_true", help="in this process, instead of on Dask workers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)
    figures = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "steps": options.steps,
        "by_batch_size": {str(batch): compare(options, batch) for batch in options.batch},
    }
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
