"""What elastic fleets cost: allocated and busy worker-hours, and makespans, of simulated searches of three shapes.

    .venv/bin/python scripts/bench_scaling.py [--json FILE] [--shape SHAPE] [--start-seconds 120]

Nothing is trained; the driver and the scheduler are those of every search. A step takes 21.5 s, an evaluation 5 s, to
load or save a state 1 s. Allocated is the time of each worker from its request, its start included, until it leaves;
busy is the time in which it trained, evaluated, loaded and saved. The fixed fleets have from 1 worker to as many as the
elastic one had at most, which cost nothing to start: the best of them is the one with the shortest makespan.

grid      96 trials: 3 x 2 beginnings, from which rates drop twice and batches grow
halving   successive halving of 64 trials of that space, each rung when all of the last one are known
trunk     400 trials that train equally for 120 of 160 steps
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import optuna
from command_line import parser_of, write

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.execution.simulated_cluster import Scaling, SimulatedCluster
from hpstage.store import MemoryJournal

SECONDS = {"step_seconds": 21.5, "evaluate_seconds": 5.0, "load_seconds": 1.0, "save_seconds": 1.0}
STEPS = 160


def grid(trial: optuna.Trial) -> dict[str, Any]:
    first = trial.suggest_categorical("first", [40, 60, 80])
    second = trial.suggest_categorical("second", [100, 120])
    rate = trial.suggest_categorical("lr", [0.1, 0.05])
    return {
        "lr": s.multistep(rate, milestones=[first, second], gamma=trial.suggest_categorical("gamma", [0.1, 0.5])),
        "momentum": trial.suggest_categorical("momentum", [0.9, 0.95]),
        "batch": s.piecewise({0: 64, trial.suggest_categorical("grow_at", [80, 120]): 256}),
    }


def trunk(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": s.piecewise({0: 0.1, 120: trial.suggest_float("lr", 1e-4, 0.1, log=True)})}


@dataclass(frozen=True)
class Shape:
    space: Callable[[optuna.Trial], dict[str, Any]]
    n_trials: int
    peak: int
    algorithm: hpstage.algorithm.Algorithm | None = None

    def search(self, executor: SimulatedExecutor) -> float:
        """Search, and return the worker-seconds used."""
        result = hpstage.optimize(
            optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)),
            Untrained(),
            self.space,
            metric="value",
            steps=STEPS,
            n_trials=self.n_trials,
            algorithm=self.algorithm,
            executor=executor,
            store=MemoryJournal(),
        )
        return result.plan.totals.worker_seconds


class Untrained:
    version = "1"


SHAPES = {
    "grid": Shape(grid, 96, 16),
    "halving": Shape(grid, 64, 16, SuccessiveHalving(min_steps=10, reduction_factor=4)),
    "trunk": Shape(trunk, 400, 40),
}


@dataclass(frozen=True)
class Found:
    allocated_over_used: float
    makespan_over_fixed: float
    allocated_over_fixed: float
    hours: float
    fixed_hours: float
    peak: int


def measure(shape: Shape, start_seconds: float) -> Found:
    elastic = SimulatedExecutor(SimulatedCluster(1, scaling=Scaling(1, shape.peak, start_seconds)), **SECONDS)
    used = shape.search(elastic)
    paid, peak = elastic.cluster.paid_seconds, elastic.cluster.most
    fixed = [SimulatedExecutor(workers, **SECONDS) for workers in range(peak, 0, -1 if peak < 4 else -(peak // 4))]
    for executor in fixed:
        shape.search(executor)
    best = min(fixed, key=lambda executor: executor.clock())
    return Found(
        paid / used,
        elastic.clock() / best.clock(),
        paid / (best.clock() * best.present),
        elastic.clock() / 3600,
        best.clock() / 3600,
        peak,
    )


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--trials", type=int, help="of each search, on 2 workers at most (default: its own)")
    parser.add_argument("--start-seconds", type=float, default=120.0, help="to start a worker")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    figures: dict[str, float] = {}
    for name in options.shape or SHAPES:
        shape = SHAPES[name] if options.trials is None else replace(SHAPES[name], n_trials=options.trials, peak=2)
        for figure, value in asdict(measure(shape, options.start_seconds)).items():
            figures[f"{name}_{figure}"] = value
            print(f"{name + '_' + figure:<28} {value:>10.4g}", flush=True)
    write(options, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
