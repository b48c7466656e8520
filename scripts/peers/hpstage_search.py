"""hpstage with its default executor and a store in a folder."""

from __future__ import annotations

import argparse
import importlib.metadata
import tempfile
from collections.abc import Mapping
from typing import Any

import optuna
import shared_task as task
import torch
from fused_search import SmallCnn

import hpstage
from hpstage import schedule as s
from hpstage.algos import ASHA, FullTraining
from hpstage.cluster import DaskExecutor


class Idle:
    """Trains nothing."""

    def setup(self, hp: Mapping[str, Any]) -> None:
        self.step = 0

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        self.step = step

    def evaluate(self) -> dict[str, float]:
        return {"accuracy": 0.5}

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: Any) -> None:
        self.step = state["step"]


def search(options: argparse.Namespace, folder: str) -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        point = {name: trial.suggest_categorical(name, values) for name, values in task.GRID.items()}
        lr = s.multistep(point["lr"], task.milestones(point, options.steps), point["gamma"])
        return {"lr": lr, "momentum": 0.9, "batch_size": options.batch}

    study = optuna.create_study(direction="maximize")
    for point in task.points(options):
        study.enqueue_trial(point)
    rung = task.first_rung(options.steps)
    asha = ASHA(min_steps=rung, reduction_factor=task.REDUCTION, variant="stopping", tree_aware=False)  # theirs
    result = hpstage.optimize(
        study,
        Idle() if options.idle else SmallCnn("auto", 8) if options.fused else SmallCnn("eager", 1),
        space,
        metric="accuracy",
        steps=options.steps,
        n_trials=len(task.points(options)),
        algorithm=asha if options.algorithm == "asha" else FullTraining(),
        evaluate_every=-(-options.steps // options.reports) if options.reports > 1 else None,
        executor=DaskExecutor(n_workers=options.workers, gpus=0),
        store=folder,
    )
    savings = result.savings
    best = max(trial.value for trial in study.trials if trial.value is not None)
    task.finish(
        [{"accuracy": best, "step": savings.steps_trained, "seconds": savings.worker_seconds}],
        {"hpstage": importlib.metadata.version("hpstage"), "torch": torch.__version__},
        merge_rate=savings.merge_rate,
        cost_weighted_merge_rate=savings.cost_weighted_merge_rate,
        makespan=savings.makespan,
    )


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        search(task.parse(), folder)


if __name__ == "__main__":
    main()
