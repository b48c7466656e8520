"""``environment=``: searches on workers of different GPUs, which compute different bits."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from distributed import Nanny, Scheduler, SpecCluster

import hpstage
from hpstage.errors import ClusterError, StoreError, UsageError
from hpstage.plan.devices import devices_of
from hpstage.testing.toys import Counter
from tests.dask.oddities import OnGPU

KINDS = ("NVIDIA A100-SXM4-40GB", "Tesla T4")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SpecCluster]:
    scheduler = {"cls": Scheduler, "options": {"dashboard_address": "127.0.0.1:0", "port": 0, "host": "127.0.0.1"}}
    workers = {kind: {"cls": Nanny, "options": {"nthreads": 1, "env": {"TEST_GPU": kind}}} for kind in KINDS}
    with SpecCluster(workers, scheduler) as cluster:
        cluster.wait_for_workers(len(KINDS))
        yield cluster


def search(cluster: SpecCluster, store: Path, **options: Any) -> hpstage.Result:
    study = optuna.create_study(study_name="kinds", sampler=optuna.samplers.RandomSampler(seed=1))
    return hpstage.optimize(
        study, OnGPU(), lambda trial: {"x": trial.suggest_float("x", 0, 1)}, metric="total", steps=3, n_trials=6,
        executor=cluster, store=store, **options,
    )  # fmt: skip


def trained_on(result: hpstage.Result) -> set[float]:
    return {result.trial(trial.number).metrics[3]["on_t4"] for trial in result.study.trials}


@pytest.mark.ci
def test_workers_with_two_kinds_of_gpu_are_refused_before_training_with_a_remedy(
    cluster: SpecCluster, tmp_path: Path
) -> None:
    with pytest.raises(ClusterError, match=r"(?s)differ in .*device.*environment='any' to train on all") as refused:
        search(cluster, tmp_path)
    assert all(kind in str(refused.value) for kind in KINDS)
    assert not list(tmp_path.iterdir())


@pytest.mark.ci
def test_environment_selects_workers_by_device_and_the_store_keeps_the_selection(
    cluster: SpecCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hpstage"):
        result = search(cluster, tmp_path, environment="t4")
    assert trained_on(result) == {1.0}
    assert "A100-SXM4-40GB)', and not 't4' (given as environment=)" in caplog.text
    branch = result.trial(0).branch(2, x=7.0, executor=cluster)
    assert branch.metrics[3]["on_t4"] == 1.0
    other = hpstage.train(OnGPU(), {"x": 3.0}, steps=3, metric="total", store=tmp_path, executor=cluster)
    assert other.metrics[3]["on_t4"] == 1.0
    with pytest.raises(StoreError, match="A100"):
        search(cluster, tmp_path, environment="A100")


@pytest.mark.ci
def test_environment_any_trains_on_all_devices_and_makes_no_audits(cluster: SpecCluster, tmp_path: Path) -> None:
    result = search(cluster, tmp_path, environment="any", audit_budget=1e3)
    assert not result.audit.line
    assert len(result.study.trials) == 6
    again = hpstage.train(OnGPU(), {"x": 3.0}, steps=3, metric="total", store=tmp_path, executor=cluster)
    assert again.metrics[3]["total"] in (9.0, 12.0)
    with pytest.raises(StoreError, match=r"any\)' there"):
        search(cluster, tmp_path, environment="T4")


@pytest.mark.ci
def test_lost_checkpoints_are_trained_again_on_another_device_with_environment_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(**options: Any) -> hpstage.TrainedTrial:
        return hpstage.train(
            OnGPU(), {"x": 1.0}, steps=6, metric="total", store=tmp_path / "store", checkpoints=tmp_path / "states",
            executor=hpstage.InlineExecutor(), checkpoint_every=2, **options,
        )  # fmt: skip

    monkeypatch.setenv("TEST_GPU", KINDS[0])
    first = run(environment="any")
    assert first.metrics[6]["total"] == 6.0
    shutil.rmtree(tmp_path / "states")
    monkeypatch.setenv("TEST_GPU", KINDS[1])
    branch = first.branch(4, x=2.0, executor=hpstage.InlineExecutor())
    assert branch.metrics[6]["total"] == 4.0 + 4 + 2 * 2.0 + 2


@pytest.mark.ci
def test_a_device_that_no_worker_has_is_refused_with_the_devices_present(cluster: SpecCluster, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"no worker has a device whose name contains 'H200'.*A100.*T4"):
        search(cluster, tmp_path, environment="H200")
    with pytest.raises(UsageError, match="winner"):
        search(cluster, tmp_path, environment="any", audit="winner")
    with pytest.raises(UsageError, match="environment"):
        search(cluster, tmp_path, environment=3)
    with pytest.raises(ClusterError, match="'cpu'"):
        hpstage.train(
            Counter(), {"x": 1.0}, steps=1, metric="total", environment="A100", executor=hpstage.InlineExecutor()
        )


def test_by_default_a_search_uses_the_device_on_which_its_store_was_trained() -> None:
    assert devices_of(None, None).text == ""
    there = devices_of(None, {"environment:device": "cuda (Tesla T4)"})
    assert there.excludes({"device": "cuda (Tesla T4)"}) is None
    assert "the states in the store were trained on it" in str(there.excludes({"device": "cuda (L4)"}))
    seen = devices_of(None, {"environment:device": "cuda (any)"}).seen(
        {"device": "cuda (L4)", "isa": "x", "torch": "2"}
    )
    assert seen == {"device": "cuda (any)", "isa": "any", "torch": "2"}
