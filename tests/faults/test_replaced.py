"""Training processes that die while their workers are idle and are replaced at once, under searches that wait.

``HPSTAGE_TEST_SEEDS=34`` tries so many seeds of each kind, in place of one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import FullTraining, Hyperband, PopulationBasedTraining, SuccessiveHalving
from hpstage.cluster import DaskExecutor
from hpstage.cluster.worker import TrainingPlugin
from hpstage.plan.messages import ChainEnded, Report, WorkerJoined
from hpstage.testing.toys import Tape
from tests.bundled import Tapes
from tests.dask.test_gangs import Net

STEPS = 16
TRIALS = 8
SEEDS = range(int(os.environ.get("HPSTAGE_TEST_SEEDS", "1")))


class Bumpy(Tape):
    """Its metrics rise and fall, as its history alone has them."""

    def evaluate(self) -> Mapping[str, float]:
        return {"score": self.score, "loss": int(self.digest[:4], 16) / 2**16}


class Replacing(DaskExecutor):
    """Kills the processes of workers that have just become idle, of which the driver has read; now and then all."""

    def __init__(self, seed: int) -> None:
        super().__init__(n_workers=3)
        self.killed = 0
        self._rng = random.Random(seed)

    def wait(self, timeout: float | None) -> list[Report]:
        reports = super().wait(timeout)
        for report in reports:
            first = not self.killed and isinstance(report, ChainEnded)
            if first or (isinstance(report, ChainEnded | WorkerJoined) and self._rng.random() < 0.25):
                self._kill(None if self._rng.random() < 0.2 else report.worker)
        return reports

    def _kill(self, address: str | None) -> None:
        cluster = self._place.cluster
        for worker in [] if cluster is None else cluster.workers.values():
            for plugin in worker.plugins.values():
                trainer = plugin.site._trainer if isinstance(plugin, TrainingPlugin) and plugin.site else None
                if trainer is not None and address in (None, worker.address):
                    trainer.kill()
                    self.killed += 1


def drops(trial: optuna.Trial) -> dict[str, Any]:
    late = trial.suggest_categorical("late", [1, 2, 3, 4])
    return {"a": s.piecewise({0: 1, trial.suggest_categorical("drop", [4, 8]): late})}


def explored(trial: optuna.Trial) -> dict[str, Any]:
    return {"a": trial.suggest_float("a", 1.0, 4.0)}


def plateaus(trial: optuna.Trial) -> dict[str, Any]:
    return {"a": s.plateau(0.5, factor=0.5, patience=trial.suggest_int("patience", 0, 3), metric="loss", every=2)}


def rates(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": s.piecewise({0: 0.01, 8: trial.suggest_categorical("late", [0.01, 0.003, 0.001, 0.0003])})}


class Kind:
    """What is searched: a trainable, a space, a metric and an algorithm."""

    def __init__(self, trainable: Callable[[], object], space: Any, metric: str, algorithm: Algorithm) -> None:
        self.trainable, self.space, self.metric, self.algorithm = trainable, space, metric, algorithm

    def search(self, seed: int, executor: hpstage.Executor, store: Path) -> list[tuple[Any, ...]]:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed), direction="maximize")
        hpstage.optimize(
            study,
            self.trainable(),
            self.space,
            metric=self.metric,
            steps=STEPS,
            n_trials=TRIALS,
            algorithm=self.algorithm,
            executor=executor,
            store=store,
            verify="off",
            audit="off",
        )
        return [(trial.params, trial.state, trial.value, trial.intermediate_values) for trial in study.trials]


KINDS = {
    "halving": Kind(Tape, drops, "score", SuccessiveHalving(min_steps=4, reduction_factor=2)),
    "hyperband": Kind(Tape, drops, "score", Hyperband(min_steps=4, reduction_factor=2)),
    "population": Kind(Tape, explored, "score", PopulationBasedTraining(interval=4)),
    "plateau": Kind(Bumpy, plateaus, "score", FullTraining()),
    "siblings": Kind(lambda: Tapes(Tape()), drops, "score", SuccessiveHalving(min_steps=4, reduction_factor=2)),
    "gangs": Kind(Net, rates, "loss", SuccessiveHalving(min_steps=4, reduction_factor=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_replacing_idle_training_processes_that_were_killed_does_not_change_a_study(
    kind: str, seed: int, tmp_path: Path
) -> None:
    alone = KINDS[kind].search(seed, hpstage.InlineExecutor(), tmp_path / "alone")
    executor = Replacing(seed)
    assert KINDS[kind].search(seed, executor, tmp_path / "store") == alone
    assert executor.killed > 0
