"""Chains on a local cluster that a driver is given, which are started by calls and not as Dask's tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster

from hpstage.checkpoints import FolderCheckpoints
from hpstage.cluster import DaskExecutor, local_cluster
from hpstage.cluster.messages import encode
from hpstage.plan.messages import ChainEnded, WorkerJoined, WorkerLeft
from hpstage.testing.chains import chain, ended, outcome, reached, until, workers
from hpstage.testing.toys import Counter, Gate
from tests.dask.processes import until as condition

pytestmark = pytest.mark.usefixtures("nothing_ahead")


@contextmanager
def opened(cluster: LocalCluster, folder: Path, gate: Gate | None = None) -> Iterator[DaskExecutor]:
    executor = DaskExecutor(cluster)
    with closing(executor):
        executor.open(Counter(gate), FolderCheckpoints(folder / "states", "w"))
        yield executor


def tasks(cluster: LocalCluster, executor: DaskExecutor) -> list[str]:
    return [key for key in cluster.scheduler.tasks if key.startswith(executor._name)]


def shut(folder: Path) -> Gate:
    folder.mkdir()
    gate = Gate(folder)
    gate.shut(1)
    return gate


@pytest.mark.ci
def test_a_chain_runs_without_a_dask_task_unless_the_cluster_scales_adaptively(tmp_path: Path) -> None:
    with local_cluster(1, gpus=0) as cluster:
        for adapts in (False, True):
            if adapts:
                cluster.adapt(minimum=1, maximum=1)  # Dask would stop workers that have no task
            folder = tmp_path / str(adapts)
            gate = shut(folder)
            with opened(cluster, folder, gate) as executor:
                [worker] = workers(executor, 1)
                executor.start(worker, chain("c", 5))
                gate.wait()
                assert len(tasks(cluster, executor)) == adapts
                gate.open()
                reports = ended(executor, "c")
                assert outcome(reports, "c").outcome == "done" and reached(reports, "c")[-1].step == 5


@pytest.mark.ci
def test_a_worker_retired_during_training_leaves_cleanly_and_drops_its_chain(tmp_path: Path) -> None:
    gate = shut(tmp_path / "gate")
    with local_cluster(1, gpus=0) as cluster, opened(cluster, tmp_path, gate) as executor:
        [worker] = workers(executor, 1)
        executor.start(worker, chain("c", 10**9))
        gate.wait()
        cluster.scale(0)
        reports = until(executor, lambda seen: any(isinstance(report, WorkerLeft) for report in seen))
        gate.open()
        assert [report.reason for report in reports if isinstance(report, WorkerLeft)] == ["closed"]
        assert not executor._futures


@pytest.mark.ci
def test_a_dead_training_process_is_reported_once_as_a_lost_worker(tmp_path: Path) -> None:
    gate = shut(tmp_path / "gate")
    with local_cluster(1, gpus=0) as cluster, opened(cluster, tmp_path, gate) as executor:
        [worker] = workers(executor, 1)
        executor.start(worker, chain("c", 10**9))
        gate.wait()
        [at] = cluster.workers.values()
        at.plugins[executor._name].site._trainer.kill()
        reports = until(executor, lambda seen: any(isinstance(report, WorkerJoined) for report in seen))
        assert [report.reason for report in reports if isinstance(report, WorkerLeft)] == ["died"]
        assert not any(isinstance(report, ChainEnded) for report in reports)


@pytest.mark.ci
def test_a_chain_abandoned_by_a_closed_search_frees_its_worker_for_the_next_search(tmp_path: Path) -> None:
    gate = shut(tmp_path / "gate")
    with local_cluster(1, gpus=0) as cluster:
        with opened(cluster, tmp_path, gate) as executor:
            [worker] = workers(executor, 1)
            executor.start(worker, chain("c", 10**9))
            gate.wait()
        gate.open()
        with opened(cluster, tmp_path) as executor:
            [worker] = workers(executor, 1)
            executor.start(worker, chain("d", 5))
            assert outcome(ended(executor, "d"), "d").outcome == "done"


@pytest.mark.ci
def test_a_chain_sent_to_a_replaced_training_process_is_stopped_and_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events of its replacement are lost, as with a scheduler that is killed."""
    lost, on_feed = [True], DaskExecutor._on_feed

    def feed(self: DaskExecutor, message: dict[str, Any]) -> None:
        if not (lost[0] and message.keys() & {"ready", "lost"}):
            on_feed(self, message)

    with local_cluster(1, gpus=0) as cluster:
        lost[0] = False
        monkeypatch.setattr(DaskExecutor, "_on_feed", feed)
        with opened(cluster, tmp_path) as executor:
            [worker] = workers(executor, 1)
            [at] = cluster.workers.values()
            site = at.plugins[executor._name].site
            lost[0], before = True, site.description.incarnation
            site._trainer.kill()
            condition(lambda: site.description.incarnation != before, "another process is there")
            lost[0] = False
            executor.start(worker, chain("c", 5))
            reports = until(executor, lambda seen: any(isinstance(report, WorkerJoined) for report in seen))
            assert outcome(reports, "c").outcome == "stopped"
            assert [report.reason for report in reports if isinstance(report, WorkerLeft)] == ["closed"]
            executor.start(worker, chain("d", 5))
            assert outcome(ended(executor, "d"), "d").outcome == "done"


@pytest.mark.ci
def test_a_worker_description_that_arrives_after_the_worker_was_removed_is_ignored(tmp_path: Path) -> None:
    with local_cluster(2, gpus=0) as cluster, opened(cluster, tmp_path) as executor:
        workers(executor, 2)
        site = next(iter(cluster.workers.values())).plugins[executor._name].site
        late = {"ready": encode(site.description), "worker": site.description.worker}
        assert executor._connection is not None
        client = executor._connection.client
        client.retire_workers([site.description.worker])
        until(executor, lambda seen: any(isinstance(report, WorkerLeft) for report in seen))
        client.log_event(executor._name, late)
        client.log_event(executor._name, {"notice": "the last event"})
        condition(lambda: client.get_events(executor._name)[-1][1].get("notice"), "events are delivered")
        assert not any(isinstance(report, WorkerJoined) for report in executor.wait(1.0))
        assert executor.present == 1
