"""Objectives that hpstage measures, on workers of a Dask cluster."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from distributed import Client

import hpstage
from hpstage.errors import UsageError
from hpstage.executor import Executor
from hpstage.testing.toys import Tape
from tests.dask.studies import space


def searched(metric: list[str], executor: Executor | Client, store: Path) -> list[list[float]]:
    study = optuna.create_study(
        directions=["maximize", "minimize"], sampler=optuna.samplers.RandomSampler(seed=1), study_name="costs"
    )
    hpstage.optimize(study, Tape(), space, metric=metric, steps=8, n_trials=4, executor=executor, store=store)
    return [trial.values for trial in study.trials]


@pytest.mark.ci
def test_checkpoint_bytes_measured_on_dask_workers_equal_those_of_the_inline_executor(
    client: Client, tmp_path: Path
) -> None:
    metric = ["score", "hpstage:bytes"]
    found = searched(metric, client, tmp_path / "dask")
    assert found == searched(metric, hpstage.InlineExecutor(), tmp_path / "inline")
    assert all(size > 0 for _, size in found)


@pytest.mark.ci
def test_the_peak_bytes_objective_is_refused_on_workers_without_gpus(client: Client, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="hpstage:peak_bytes is the peak memory of CUDA devices"):
        searched(["score", "hpstage:peak_bytes"], client, tmp_path / "dask")
