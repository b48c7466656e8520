"""hpstage on a local cluster. The store is left where it runs."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import optuna
import shared_task as task

import hpstage

if TYPE_CHECKING:
    from distributed import LocalCluster


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


def search(options: argparse.Namespace, cluster: LocalCluster) -> None:
    # Here, since the workers, which are starting, import torch at the same time.
    import torch
    from small_cnn import SmallCnn

    from hpstage import schedule as s
    from hpstage.algos import ASHA, FullTraining

    def space(trial: optuna.Trial) -> dict[str, Any]:
        point = {name: trial.suggest_categorical(name, values) for name, values in task.GRID.items()}
        lr = s.multistep(point["lr"], task.milestones(point, options.steps), point["gamma"])
        return {"lr": lr, "momentum": 0.9, "batch_size": options.batch}

    # Nothing is sampled, so that all trials can be open at a time.
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler())
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
        executor=cluster,
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
    options = task.parse()
    with hpstage.local_cluster(n_workers=options.workers, gpus=0, preload=["hpstage.torch"]) as cluster:
        search(options, cluster)


if __name__ == "__main__":
    main()
