"""48 trials of a small model, as a stage tree: what ``bench_engine.py`` and ``bench_fused_search.py`` measure."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from engine_models import SUBJECTS
from small_cnn import GRID, SmallCnn

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import ASHA, FullTraining, Hyperband, SuccessiveHalving
from hpstage.cluster import DaskExecutor
from hpstage.plan.log import read_header
from hpstage.plan.same_workload import NUMERICS
from hpstage.store import MemoryJournal

MODELS = ("cnn", "mlp", "gpt")
ALGORITHMS: dict[str, Callable[[int], Algorithm]] = {
    "full": lambda steps: FullTraining(),
    "halving": lambda steps: SuccessiveHalving(min_steps=max(1, steps // 27), reduction_factor=3),
    "asha": lambda steps: ASHA(min_steps=max(1, steps // 27), reduction_factor=3),
    "hyperband": lambda steps: Hyperband(min_steps=max(1, steps // 27), reduction_factor=3),
}
"""Made of the steps of a trial."""


def trainable(model: str, numerics: str, stacked: int) -> Any:
    if model == "cnn":
        return SmallCnn(numerics, stacked)
    made = SUBJECTS[model]()
    made.numerics, made.max_stacked = numerics, stacked
    return made


class Timed:
    """An executor that reports how long it has measured."""

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

    def measure(self, initial: Mapping[str, Any], steps: float) -> dict[str, float] | None:
        return self.timed(lambda: DaskExecutor.measure(self, initial, steps))


class Here(hpstage.InlineExecutor, Timed):
    def __init__(self) -> None:
        hpstage.InlineExecutor.__init__(self)
        Timed.__init__(self)

    def measure(self, initial: Mapping[str, Any], steps: float) -> dict[str, float] | None:
        return self.timed(lambda: hpstage.InlineExecutor.measure(self, initial, steps))


def search(
    numerics: str, stacked: int, steps: int, batch: int, workers: int, model: str = "cnn", algorithm: str = "full"
) -> dict[str, Any]:
    """Train the grid; ``workers`` 0 trains in this process."""
    small = model == "cnn"

    def space(trial: optuna.Trial) -> dict[str, Any]:
        lr, drop = trial.suggest_categorical("lr", GRID["lr"]), trial.suggest_categorical("drop", GRID["drop"])
        gamma, late = trial.suggest_categorical("gamma", GRID["gamma"]), trial.suggest_categorical("late", GRID["late"])
        milestones = [round(drop * steps), *([round(0.9 * steps)] if late else [])]
        return {"lr": s.multistep(lr, milestones, gamma), "batch_size": batch, **({"momentum": 0.9} if small else {})}

    study = optuna.create_study(
        direction="maximize" if small else "minimize", sampler=optuna.samplers.GridSampler(GRID, seed=0)
    )
    executor = Workers(workers) if workers else Here()
    begin = time.perf_counter()
    result = hpstage.optimize(
        study,
        trainable(model, numerics, stacked),
        space,
        metric="accuracy" if small else "loss",
        steps=steps,
        algorithm=ALGORITHMS[algorithm](steps),
        n_trials=48,
        executor=executor,
        store=(journal := MemoryJournal()),
    )
    savings, times = result.savings, result.plan.step_times
    return {
        "requested": numerics,
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
        "states": {key: state.digest for key, state in result.plan.kept.items()},
        "values": {json.dumps(trial.params, sort_keys=True): trial.value for trial in study.trials},
    }
