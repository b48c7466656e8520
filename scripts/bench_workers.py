"""Whether many workers are kept busy by default, and what a sampler that learns pays for it.

    .venv/bin/python scripts/bench_workers.py [--json FILE] [--part makespan] [--part knowledge] [--part short]
                                              [--workers 32] [--trials 300]

makespan   searches on simulated workers, each with its default window: the makespan over the lower bound of the same
           work (hpstage/plan/bound.py). 160 steps of 0.2 s, in a space whose trials begin equally (that of
           bench_simulation.py), with TPESampler; the median of three seeds
knowledge  TPESampler on Optuna alone, with so many trials open as full training has on 1 to 8, 16 and 32 workers, with
           one, 32, and all of them: the best value of a function of six numbers (0 is the least), the median of eight
           seeds
short      trials of one step of a second, really on a local cluster (--workers 16 --trials 10000): seconds over the
           least possible, and processor time of this process, in which Dask's scheduler runs, too
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from bench_simulation import space
from command_line import parser_of, write

import hpstage
from hpstage.algorithm import Algorithm, Setting, Trials
from hpstage.algos import ASHA, FullTraining, Hyperband, MedianStopping, SuccessiveHalving

ALGORITHMS: dict[str, Algorithm] = {
    "full": FullTraining(),
    "full_16": FullTraining(window=16),
    "halving": SuccessiveHalving(6, 3),
    "asha": ASHA(6, 3),
    "asha_stopping": ASHA(6, 3, "stopping"),
    "hyperband_random": Hyperband(6, 3),
    "bohb": Hyperband(6, 3),
    "hyperband_async": Hyperband(6, 3, "asynchronous"),
    "median": MedianStopping(18, 18),
}
COSTS: dict[str, Any] = {"step_seconds": 0.2, "evaluate_seconds": 0.02, "load_seconds": 0.02, "save_seconds": 0.02}


def makespan(options: argparse.Namespace) -> dict[str, float]:
    figures = {}
    for name, algorithm in ALGORITHMS.items():
        ratios = []
        for seed in range(3):
            sampler = optuna.samplers.TPESampler(seed=seed)
            if name.endswith("_random"):
                sampler = optuna.samplers.RandomSampler(seed=seed)
            (fleet,) = hpstage.preflight(
                space,
                steps=160,
                n_trials=options.trials,
                workers=(options.workers,),
                algorithm=algorithm,
                sampler=sampler,
                rehearsals=1,
                **COSTS,
            ).fleets
            ratios.append(fleet.makespan.median / fleet.lower_bound.median)
        figures[f"{name}_over_bound"] = statistics.median(ratios)
    return figures


def best(window: int, trials: int, seed: int) -> float:
    """Return the best of so many trials, of which the oldest of ``window`` is reported before another is proposed."""
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    waiting: deque[optuna.Trial] = deque()

    def report() -> None:
        trial = waiting.popleft()
        study.tell(trial, sum((value - 0.3) ** 2 for value in trial.params.values()))

    for _ in range(trials):
        if len(waiting) == window:
            report()
        waiting.append(study.ask({f"x{i}": optuna.distributions.FloatDistribution(-1.0, 1.0) for i in range(6)}))
    while waiting:
        report()
    return study.best_value


def knowledge(options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    for window in (1, 32, options.trials):  # as Optuna alone on a worker, on 32, and without any knowledge
        found = [best(window, options.trials, seed) for seed in range(8)]
        figures[f"best_of_window_{window}"] = statistics.median(found)
    for workers in (8, 16, 32):
        setting = Setting(steps=1, n_trials=options.trials, maximize=False, adaptive=True, workers=workers)
        window = FullTraining().start(setting, Trials()).room()
        found = [best(window, options.trials, seed) for seed in range(8)]
        figures[f"window_on_{workers}"] = window
        figures[f"best_on_{workers}"] = statistics.median(found)
    return figures


class Sleeper:
    """Takes a second for a step."""

    def setup(self, hp: Mapping[str, Any]) -> None:
        self.step = 0

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        time.sleep(1.0)
        self.step = step

    def evaluate(self) -> dict[str, float]:
        return {"loss": 0.5}

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: Any) -> None:
        self.step = state["step"]


def short(options: argparse.Namespace) -> dict[str, float]:
    with (
        tempfile.TemporaryDirectory() as folder,
        hpstage.local_cluster(n_workers=options.workers, gpus=0) as cluster,
    ):
        began, busy = time.perf_counter(), time.process_time()
        result = hpstage.optimize(
            optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)),
            Sleeper(),
            lambda trial: {"lr": trial.suggest_float("lr", 0.0, 1.0)},
            metric="loss",
            steps=1,
            n_trials=options.trials,
            executor=cluster,
            store=Path(folder) / "store",
        )
        took, busy = time.perf_counter() - began, time.process_time() - busy
    least = -(-options.trials // options.workers)
    return {
        "wall_over_least": took / least,
        "makespan_over_least": (result.savings.makespan or took) / least,
        "driver_ms_per_trial": 1000 * busy / options.trials,
    }


PARTS = {"makespan": makespan, "knowledge": knowledge, "short": short}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: makespan and knowledge")
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--trials", type=int, default=300)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    figures: dict[str, float] = {}
    for name in options.part or ("makespan", "knowledge"):
        figures |= (found := PARTS[name](options))
        for figure, value in found.items():
            print(f"{figure:<28} {value:>10,.4g}", flush=True)
    write(options, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
