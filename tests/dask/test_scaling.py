"""Adaptive scaling follows what searches can use: Dask's own, and that of Dask's Kubernetes operator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType

import dask.config
import optuna
import pytest
from distributed import Client, LocalCluster

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import merged
from hpstage.cluster.adaptive import DemandFeed
from hpstage.executor import Executor
from hpstage.plan.facts import StateReached
from hpstage.store import MemoryJournal
from tests.dask.processes import until
from tests.dask.steady import Staged

STEPS = 1000
API = "distributed.http.scheduler.api"
"""The page that the operator reads; its own clusters' schedulers have it."""


@contextmanager
def a_cluster(n_workers: int, *pages: str) -> Iterator[LocalCluster]:
    with (
        dask.config.set({"distributed.scheduler.http.routes": list(pages)}),
        LocalCluster(
            n_workers=n_workers, threads_per_worker=1, memory_limit=0, dashboard_address="127.0.0.1:0"
        ) as cluster,
    ):
        yield cluster


def space(trial: optuna.Trial) -> dict[str, object]:
    return {"a": s.piecewise({0: 9, 10: trial.suggest_categorical("a", [0, 1, 2])})}


def search(executor: Executor | Client, folder: Path, checkpoints: Path | None = None) -> hpstage.Result:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return hpstage.optimize(
        optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler({"a": [0, 1, 2]})),
        Staged(str(folder)),
        space,
        metric="score",
        steps=STEPS,
        n_trials=3,
        executor=executor,
        verify="off",
        store=MemoryJournal(),
        checkpoints=checkpoints,
    )


@pytest.fixture
def alone(tmp_path: Path) -> dict[int, float | None]:
    """What each trial comes to in this process."""
    folder = tmp_path / "alone"
    folder.mkdir()
    (folder / "go").touch()
    (folder / "end").touch()
    return values(search(hpstage.InlineExecutor(), folder))


def values(result: hpstage.Result) -> dict[int, float | None]:
    return {trial.params["a"]: trial.value for trial in result.study.trials}


@contextmanager
def searching(cluster: LocalCluster, folder: Path) -> Iterator[Future[hpstage.Result]]:
    with Client(cluster, set_as_default=False) as client, ThreadPoolExecutor(1) as pool:
        future = pool.submit(search, client, folder, folder / "states")
        try:
            yield future
        finally:
            (folder / "go").touch()  # also where the test has failed
            (folder / "end").touch()


def trained_by(folder: Path) -> int:
    return len(list(folder.glob("worker-*")))


@pytest.mark.ci
def test_an_adaptive_cluster_grows_and_shrinks_with_the_stage_tree(
    tmp_path: Path, alone: dict[int, float | None]
) -> None:
    with a_cluster(0) as cluster:
        own = cluster.scheduler.adaptive_target
        cluster.adapt(minimum=0, maximum=3, interval="100ms", wait_count=2)
        with searching(cluster, tmp_path) as future:
            until(lambda: future.done() or trained_by(tmp_path) == 3, "three workers train what forks")
            assert not future.done()
            (tmp_path / "go").touch()
            until(lambda: len(cluster.scheduler.workers) == 1, "those that have nothing more to do have left")
            assert not future.done()
            (tmp_path / "end").touch()
            result = future.result(120)
        until(lambda: not cluster.scheduler.workers, "nobody needs a worker")
        assert cluster.scheduler.adaptive_target == own == cluster.scheduler.handlers["adaptive_target"]
    assert values(result) == alone
    reached = [fact for fact in result.journal if isinstance(fact, StateReached)]
    assert (
        result.plan.totals.steps_trained == merged(result.plan).steps_unique == sum(r.step - r.start for r in reached)
    )


def test_worker_demands_of_concurrent_searches_add_up_until_each_search_ends() -> None:
    with a_cluster(0) as cluster, Client(cluster, set_as_default=False) as watching:
        own = cluster.scheduler.adaptive_target

        def target() -> int:
            return int(watching.sync(watching.scheduler.adaptive_target))

        address = cluster.scheduler_address  # a search that is given a cluster of its process looks only if it adapts
        with Client(address, set_as_default=False) as one, Client(address, set_as_default=False) as two:
            feeds = DemandFeed(), DemandFeed()
            for feed, client in zip(feeds, (one, two), strict=True):
                feed.connect(client)
            until(lambda: target() == 2, "each requests its first worker")
            for feed in feeds:
                feed.follow(lambda now, start_seconds: 3)
                feed.look(0.0)
            until(lambda: target() == 6, "both ask for three")
            one.close()
            until(lambda: target() == 3, "one of them is gone")
            waiting = watching.submit(pow, 2, 5)  # other tasks count, too, where they need more
            feeds[1].follow(lambda now, start_seconds: 0)
            until(lambda: feeds[1].look(0.0) is None and target() == 1, "a task waits for a worker")
            waiting.cancel()
        until(lambda: cluster.scheduler.adaptive_target == own, "nobody searches")


@pytest.mark.ci
@pytest.mark.parametrize("pages", [[API], []], ids=["over HTTP", "over Dask's own protocol"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the operator imports
def test_the_kubernetes_operators_autoscaler_reads_the_demand_and_retires_idle_workers(
    tmp_path: Path, alone: dict[int, float | None], pages: list[str]
) -> None:
    """Its own functions, which find the scheduler by the name of a service. Kubernetes' part is played by scale()."""
    operator = pytest.importorskip("dask_kubernetes.operator.controller.controller", reason="pip install hpstage[dev]")
    with a_cluster(1, *pages) as cluster:

        async def address(service: str, namespace: str, port_name: str = "", **_: object) -> str:
            assert port_name == "http-dashboard" or not pages, "it uses Dask's protocol where it gets no answer"
            page = f"http://127.0.0.1:{cluster.scheduler.http_server.port}"
            return page if port_name == "http-dashboard" else str(cluster.scheduler_address)

        # Not by monkeypatch: that the driver's process has a function of a library replaced is refused, rightly.
        own = {**vars(operator), "get_scheduler_address": address}
        get_desired_workers = FunctionType(operator.get_desired_workers.__code__, own)
        retire_workers = FunctionType(operator.retire_workers.__code__, own)

        def desired() -> int:
            return int(asyncio.run(get_desired_workers("scheduler", "default")))

        with searching(cluster, tmp_path) as future:
            until(lambda: desired() == 3, "what forks can use three workers")
            cluster.scale(3)
            until(lambda: trained_by(tmp_path) == 3, "three workers train what forks")
            (tmp_path / "go").touch()
            until(lambda: desired() == 1, "the last path needs one")
            retired = asyncio.run(retire_workers(2, "scheduler", "default", "default", logging.getLogger("operator")))
            assert len(retired) == 2
            until(lambda: len(cluster.scheduler.workers) == 1, "two have left")
            assert not future.done()
            (tmp_path / "end").touch()
            result = future.result(120)
        assert desired() == 0
    assert values(result) == alone
    assert result.plan.totals.steps_trained == merged(result.plan).steps_unique
