"""Clusters of dask-jobqueue: jobs of a queue train a search, also where their time is over in the middle."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.testing.toys import Tape
from tests.dask.processes import ROOT
from tests.hosts import slurm

optuna.logging.set_verbosity(optuna.logging.ERROR)

STEPS = 100
LATE = [2, 3, 4, 5]


class Slow(Tape):
    """``pause``: seconds that a step takes."""

    version = "1"

    def __init__(self, pause: float) -> None:
        super().__init__()
        self.pause = pause

    def train(self, step: int, hp: Any) -> None:
        time.sleep(self.pause)
        super().train(step, hp)


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"a": s.piecewise({0: 1, 40: trial.suggest_categorical("late", LATE)})}


def search(executor: Any, store: Path, pause: float = 0.0) -> tuple[list[Any], int]:
    """Return the trials, and the number of steps trained."""
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler({"late": LATE}))
    result = hpstage.optimize(
        study, Slow(pause), space, metric="score", steps=STEPS, n_trials=len(LATE), executor=executor, store=store,
        audit="off", verify="off",
    )  # fmt: skip
    return [(trial.params, trial.value) for trial in study.trials], result.savings.steps_trained


UNIQUE = 40 + len(LATE) * (STEPS - 40)


@pytest.fixture
def jobs(tmp_path: Path) -> dict[str, Any]:
    """What all clusters are made with."""
    return {
        "cores": 1,
        "memory": "1GB",
        "processes": 1,
        "log_directory": str(tmp_path / "logs"),
        "job_script_prologue": [f"cd {ROOT}", f"export PYTHONPATH={ROOT}"],
        "scheduler_options": {"dashboard_address": "127.0.0.1:0"},
        "worker_command": "hpstage worker",
        "worker_extra_args": ["--nworkers", "1"],
    }


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if why := slurm.missing():
        pytest.skip(f"no Slurm: {why}")
    with slurm.slurm(tmp_path / "slurm") as configuration:
        monkeypatch.setenv("SLURM_CONF", os.fspath(configuration))
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("queue")
def test_a_search_outlives_the_time_limit_of_its_jobs_and_trains_nothing_twice(
    jobs: dict[str, Any], tmp_path: Path
) -> None:
    """A minute, the shortest limit that Slurm has; both jobs reach it before the search ends."""
    # Not where tests are collected: it replaces the handler of SIGINT.
    SLURMCluster = pytest.importorskip("dask_jobqueue", reason="pip install dask-jobqueue").SLURMCluster
    with SLURMCluster(**jobs, walltime="00:01:00", queue="debug", interface="lo") as cluster:
        cluster.adapt(minimum_jobs=2, maximum_jobs=2)
        found, trained = search(cluster, tmp_path / "store", pause=1.0)
    logs = [path.read_text() for path in (tmp_path / "logs").glob("*.err")]
    assert len(logs) > 2 and any("CANCELLED" in log for log in logs)  # their time was over
    assert found == search(hpstage.InlineExecutor(), tmp_path / "inline")[0]
    assert trained == UNIQUE
