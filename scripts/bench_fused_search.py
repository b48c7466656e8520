"""What stacking siblings saves in a whole search: 48 trials of a small CNN on scikit-learn's digits, as a stage tree.

The same search is trained merged (``numerics = "eager"``) and merged and fused (``"stacked"``), in turn, on local Dask
workers; worker-seconds of the two are compared within a round. Metrics must not depend on how many are trained as one.

    python scripts/bench_fused_search.py --json fused.json
    python scripts/bench_fused_search.py --steps 300 --rounds 1 --inline
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Mapping
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


def search(numerics: str, stacked: int, steps: int, batch: int, workers: int) -> dict[str, Any]:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        lr, drop = trial.suggest_categorical("lr", GRID["lr"]), trial.suggest_categorical("drop", GRID["drop"])
        gamma, late = trial.suggest_categorical("gamma", GRID["gamma"]), trial.suggest_categorical("late", GRID["late"])
        milestones = [round(drop * steps), *([round(0.9 * steps)] if late else [])]
        return {"lr": s.multistep(lr, milestones, gamma), "momentum": 0.9, "batch_size": batch}

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler(GRID, seed=0))
    begin = time.perf_counter()
    result = hpstage.optimize(
        study,
        SmallCnn(numerics, stacked),
        space,
        metric="accuracy",
        steps=steps,
        n_trials=48,
        executor=DaskExecutor(n_workers=workers, gpus=0) if workers else hpstage.InlineExecutor(),
        store=MemoryJournal(),
    )
    savings = result.savings
    return {
        "numerics": numerics,
        "seconds": savings.worker_seconds,
        "train_seconds": savings.train_seconds,
        "makespan": savings.makespan,
        "wall": time.perf_counter() - begin,
        "steps_trained": savings.steps_trained,
        "steps_unique": savings.steps_unique,
        "merge_rate": savings.merge_rate,
        "values": {json.dumps(trial.params, sort_keys=True): trial.value for trial in study.trials},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--stacked", type=int, default=8, metavar="K", help="siblings as one at most (default: 8)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--inline", action="store_true", help="in this process, instead of on Dask workers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)
    workers = 0 if options.inline else options.workers
    rounds = []
    for number in range(options.rounds):
        ways: list[tuple[str, int]] = [("eager", 1), ("stacked", options.stacked)]
        done = {way[0]: search(*way, options.steps, options.batch, workers) for way in ways[:: 1 - 2 * (number % 2)]}
        rounds.append(done)
        for way in done.values():
            print(
                f"round {number}  {way['numerics']:8} {way['seconds']:7.1f} worker-s  "
                f"makespan {way['makespan']:6.1f} s  "
                f"wall {way['wall']:6.1f} s  {way['steps_trained']:,} of {way['steps_unique']:,} steps, merge rate "
                f"{way['merge_rate']:.2f}",
                flush=True,
            )
    values = [way["stacked"]["values"] for way in rounds]
    values.append(search("stacked", 3, options.steps, options.batch, 0)["values"])
    figures = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "steps": options.steps,
        "batch_size": options.batch,
        "merge_seconds": statistics.median(done["eager"]["seconds"] for done in rounds),
        "fused_seconds": statistics.median(done["stacked"]["seconds"] for done in rounds),
        "fused_ratio": statistics.median(done["stacked"]["seconds"] / done["eager"]["seconds"] for done in rounds),
        "makespan_ratio": statistics.median(done["stacked"]["makespan"] / done["eager"]["makespan"] for done in rounds),
        "k_invariant": all(other == values[0] for other in values),
        "equals_eager": values[0] == rounds[0]["eager"]["values"],
        "rounds": rounds,
    }
    print(
        f"fused / merged worker-seconds {figures['fused_ratio']:.2f}, makespan {figures['makespan_ratio']:.2f}; values "
        f"depend on K: {not figures['k_invariant']}; equal eager's: {figures['equals_eager']}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
