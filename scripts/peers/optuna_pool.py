"""Optuna with a pool of processes; ASHA is its SuccessiveHalvingPruner, whose values go through a journal file."""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import optuna
import shared_task as task
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend


def pruner(options: argparse.Namespace) -> optuna.pruners.BasePruner:
    if options.algorithm == "full":
        return optuna.pruners.NopPruner()
    return optuna.pruners.SuccessiveHalvingPruner(
        min_resource=task.first_rung(options.steps), reduction_factor=task.REDUCTION
    )


def trained(file: str, trial_id: int, point: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.load_study(
        study_name="peers", storage=JournalStorage(JournalFileBackend(file)), pruner=pruner(options)
    )
    trial = optuna.Trial(study, trial_id)

    def report(found: dict[str, float]) -> bool:
        trial.report(found["accuracy"], int(found["step"]))
        return not trial.should_prune()

    return task.train(point, options, report)


def main() -> None:
    options = task.parse()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "journal")
        study = optuna.create_study(
            study_name="peers",
            direction="maximize",
            storage=JournalStorage(JournalFileBackend(file)),
        )
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
            running: dict[Future[dict[str, float]], optuna.Trial] = {}
            for point in task.points(options):
                study.enqueue_trial(point)
                trial = study.ask()
                for name, values in task.GRID.items():
                    trial.suggest_categorical(name, values)
                running[pool.submit(trained, file, trial._trial_id, point, options)] = trial
            found = []
            for done in as_completed(running):
                found.append(done.result())
                if found[-1]["step"] == options.steps:
                    study.tell(running[done], found[-1]["accuracy"])
                else:
                    study.tell(running[done], state=optuna.trial.TrialState.PRUNED)
    task.finish(found, {"optuna": optuna.__version__})


if __name__ == "__main__":
    main()
