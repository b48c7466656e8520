"""Syne Tune with its local backend, which starts a process for each trial."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from typing import Any

import shared_task as task
import syne_tune
from syne_tune import Reporter, StoppingCriterion, Tuner
from syne_tune.backend import LocalBackend
from syne_tune.config_space import choice
from syne_tune.optimizer.baselines import ASHA, RandomSearch
from syne_tune.tuner_callback import TunerCallback

OPTIONS = "HPSTAGE_BENCH_OPTIONS"


class Last(TunerCallback):
    """Keeps the last values of each trial."""

    def __init__(self) -> None:
        self.found: dict[int, dict[str, float]] = {}

    def on_trial_result(self, trial: Any, status: str, result: dict[str, Any], decision: str) -> None:
        self.found[trial.trial_id] = {name: float(result[name]) for name in ("accuracy", "step", "seconds")}


def main(options: argparse.Namespace) -> None:
    logging.getLogger().setLevel(logging.ERROR)
    os.environ[OPTIONS] = json.dumps(vars(options))  # the processes of trials inherit it
    space = {name: choice(values) for name, values in task.GRID.items()}
    given: dict[str, Any] = {"do_minimize": False, "random_seed": 0, "points_to_evaluate": task.points(options)}
    if options.algorithm == "asha":
        scheduler = ASHA(
            space,
            metric="accuracy",
            time_attr="reported_step",
            max_t=options.steps,
            grace_period=task.first_rung(options.steps),
            reduction_factor=task.REDUCTION,
            **given,
        )
    else:
        scheduler = RandomSearch(space, metrics=["accuracy"], **given)
    last = Last()
    with tempfile.TemporaryDirectory() as folder:
        Tuner(
            trial_backend=LocalBackend(entry_point=__file__),
            scheduler=scheduler,
            stop_criterion=StoppingCriterion(max_num_trials_started=len(task.points(options))),
            wait_trial_completion_when_stopping=True,
            n_workers=options.workers,
            sleep_time=0.1,
            callbacks=[last],
            save_tuner=False,
            trial_backend_path=folder,
        ).run()
    task.finish([*last.found.values()], {"syne-tune": syne_tune.__version__})


def trial() -> None:
    parser = argparse.ArgumentParser()
    for name, values in task.GRID.items():
        parser.add_argument(f"--{name}", type=type(values[0]))
    given, _ = parser.parse_known_args()
    reporter = Reporter()

    def report(found: dict[str, float]) -> bool:
        reporter(**found, reported_step=int(found["step"]))
        return True  # Syne Tune ends the process

    point = {name: getattr(given, name) for name in task.GRID}
    task.train(point, argparse.Namespace(**json.loads(os.environ[OPTIONS])), report)


if __name__ == "__main__":
    trial() if "--lr" in sys.argv else main(task.parse())
