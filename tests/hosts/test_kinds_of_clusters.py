"""Each kind of cluster that Dask's projects start trains the study that one process trains."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster

from hpstage.store import MemoryJournal
from tests.dask.schemas import calls_in_docs
from tests.dask.steady import Steady
from tests.dask.studies import search, trials, undisturbed
from tests.hosts import gateway

pytestmark = [
    pytest.mark.ci,
    # dask-jobqueue does not wait for a local job that it ends, and dask-gateway closes itself again when it is deleted.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@contextmanager
def with_nannies(_: Path) -> Iterator[Any]:
    with LocalCluster(2, threads_per_worker=1, memory_limit=0, dashboard_address="127.0.0.1:0") as cluster:
        yield cluster


@contextmanager
def of_local_jobs(folder: Path) -> Iterator[Any]:
    # Not where tests are collected: it replaces the handler of SIGINT.
    local = pytest.importorskip("dask_jobqueue.local", reason="pip install dask-jobqueue")
    with local.LocalCluster(
        cores=1, memory="1GB", processes=1, interface="lo", log_directory=str(folder),
        scheduler_options={"dashboard_address": "127.0.0.1:0"},
        worker_command="hpstage worker", worker_extra_args=["--nworkers", "1"],
    ) as cluster:  # fmt: skip
        cluster.scale(2)
        yield cluster


@contextmanager
def of_a_gateway(folder: Path) -> Iterator[Any]:
    if why := gateway.missing():
        pytest.skip(why)
    from dask_gateway import GatewayCluster

    with (
        gateway.gateway(folder / "gateway", ["hpstage", "worker", "--nworkers", "1"]) as address,
        GatewayCluster(address) as cluster,
    ):
        cluster.scale(2)
        yield cluster


@contextmanager
def of_kubernetes(folder: Path) -> Iterator[Any]:
    """As the pages start it."""
    operator = pytest.importorskip("dask_kubernetes.operator", reason="pip install dask-kubernetes")
    pytest.importorskip("jsonschema", reason="pip install jsonschema")
    from tests.hosts.kubernetes import kubernetes

    [given] = calls_in_docs("KubeCluster")
    with (
        kubernetes(folder) as (here, configuration),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("KUBECONFIG", str(configuration))
        with operator.KubeCluster(
            **given, namespace="default", scheduler_service_type="LoadBalancer", quiet=True
        ) as cluster:
            cluster.scale(2)
            yield cluster
        assert not here.pods


KINDS = [with_nannies, of_local_jobs, of_a_gateway, of_kubernetes]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_search_on_each_kind_of_cluster_gives_the_same_study_as_in_one_process(kind: Any, tmp_path: Path) -> None:
    with kind(tmp_path) as cluster:
        result = search(Steady(None), cluster, MemoryJournal(), tmp_path / "states")
    del cluster
    gc.collect()  # what is left behind is found here, and not by a later test
    study, unique = undisturbed()
    assert trials(result.study) == study
    assert result.savings.steps_trained == unique
