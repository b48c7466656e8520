"""A scheduler that is killed and restarted in the middle of a study."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from hpstage.checkpoints import FolderCheckpoints
from hpstage.cluster import DaskExecutor
from hpstage.cluster.connection import Connection
from hpstage.cluster.private import ClientOnce
from hpstage.errors import ClusterError, UsageError
from hpstage.plan.messages import ChainEnded, WorkerJoined, WorkerLeft
from hpstage.testing.chains import chain, ended, outcome, reached, workers
from hpstage.testing.chains import until as until_reports
from hpstage.testing.toys import Counter, Gate
from tests.dask.commands import free_port
from tests.dask.processes import Processes, end, until
from tests.dask.steady import Steady
from tests.dask.studies import Running, trials, undisturbed

Open = Callable[..., DaskExecutor]


class Site:
    """A scheduler and a worker."""

    def __init__(self, processes: Processes) -> None:
        self.address = processes.address
        self._processes = processes
        self._start()

    def _start(self) -> None:
        self.scheduler = self._processes.scheduler()
        self.worker = self._processes.worker()

    def restart(self) -> None:
        end(self.scheduler)
        end(self.worker)
        self._start()


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Processes(tmp_path_factory.mktemp("site")) as processes:
        yield Site(processes)


@pytest.fixture
def site(shared_site: Site) -> Site:
    if shared_site.scheduler.poll() is not None:
        shared_site.restart()
    return shared_site


@pytest.mark.ci
def test_a_study_resumes_when_its_dask_scheduler_is_restarted(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = undisturbed()
    connected = []

    def connect(*args: Any, **options: Any) -> Connection:
        connected.append(args)
        assert len(connected) != 2  # as Dask's client does when a scheduler's greeting does not come alone
        return Connection(*args, **options)

    monkeypatch.setattr("hpstage.cluster.executor.Connection", connect)
    with Client(site.address, set_as_default=False) as client:
        client.wait_for_workers(1, timeout=120)
        study = Running(Steady(tmp_path, 0.02), client, tmp_path)
        until(lambda: len(study.reached()) >= 3, "states are reached")
        end(site.scheduler)
        until(lambda: site.worker.poll() is not None, "a worker without a scheduler ends")
        before = study.reached()
        site.restart()
        result = study.result()
        said = list(caplog.records)
        # The given client, too, tries to reconnect; closed at that time, it would leave a socket behind.
        until(lambda: client.status == "running", "the given client is back")
    assert trials(result.study) == expected
    assert study.reached()[: len(before)] == before
    assert len(set(study.pools())) == len(study.pools()) == 2
    ours = [record.getMessage() for record in said if record.name == "hpstage"]
    assert len([text for text in ours if "is lost" in text]) == 1
    assert len([text for text in ours if "is back" in text]) == 1
    assert len(ours) == 2 and len(connected) > 2
    assert not [record.getMessage() for record in said if record.exc_info and record.levelno > logging.INFO]


@pytest.mark.ci
def test_a_client_that_is_reconnecting_to_its_scheduler_is_accepted(site: Site, tmp_path: Path) -> None:
    with Client(site.address, set_as_default=False) as client:
        end(site.scheduler)
        until(lambda: client.status == "connecting", "the client has noticed")
        site.restart()
        executor = DaskExecutor(client)
        executor.open(Counter(), FolderCheckpoints(tmp_path / "states", "w"))
        assert len(workers(executor, 1)) == 1
        executor.close()
        until(lambda: client.status == "running", "the given client is back")
    with pytest.raises(UsageError, match="the given client is closed"):
        DaskExecutor(client).open(Counter(), None)


@pytest.mark.ci
def test_a_study_raises_an_error_with_a_remedy_when_its_scheduler_does_not_return(site: Site, tmp_path: Path) -> None:
    with Client(site.address, set_as_default=False) as client:
        client.wait_for_workers(1, timeout=120)
        study = Running(Steady(tmp_path, 0.02), DaskExecutor(client, worker_timeout=0.5), tmp_path)
        until(lambda: study.reached(), "a state is reached")
        end(site.scheduler)
        with pytest.raises(ClusterError, match=r"gone for 0 s.*run the same command again"):
            study.result()


@pytest.mark.slow  # Dask tries for half a minute
def test_losing_the_scheduler_during_setup_raises_an_error_with_a_remedy(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = DaskExecutor._install

    def then_end_it(*arguments: Any) -> None:
        install(*arguments)
        end(site.scheduler)

    monkeypatch.setattr(DaskExecutor, "_install", then_end_it)
    with Client(site.address, set_as_default=False) as client:
        client.wait_for_workers(1, timeout=120)
        with pytest.raises(ClusterError, match=r"while the workers were being set up.*run the same command again"):
            DaskExecutor(client).open(Counter(), None)


@pytest.mark.ci
@pytest.mark.usefixtures("nothing_ahead")
def test_losing_the_local_cluster_raises_an_error_with_a_remedy(tmp_path: Path) -> None:
    executor = DaskExecutor(n_workers=1, gpus=0)
    executor.open(Counter(), FolderCheckpoints(tmp_path, "w"))
    workers(executor, 1)
    assert executor._place.cluster is not None
    executor._place.cluster.close()
    with closing(executor), pytest.raises(ClusterError, match="Run the same command again"):
        until_reports(executor, lambda _: False)


def test_a_failed_connection_attempt_leaves_no_event_loop_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="Timed out"):
        ClientOnce(f"tcp://127.0.0.1:{free_port()}", timeout=0.2, set_as_default=False)
    assert set(threading.enumerate()) <= before


def test_deleting_a_closed_client_does_not_block_while_another_event_loop_starts(client: Client) -> None:
    """As the garbage collector does, in whichever thread: it may hold the lock of Dask's loops."""
    closed = ClientOnce(client.scheduler.address, set_as_default=False)
    closed.close()
    deleting = threading.Thread(target=closed.__del__, daemon=True)
    with closed._loop_runner._lock:
        deleting.start()
        deleting.join(30)
        assert not deleting.is_alive()


@pytest.mark.ci
def test_chains_of_a_broken_connection_stop_and_their_workers_train_again(
    open_executor: Open, client: Client, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    gate.shut(5)
    executor = open_executor(Counter(gate))
    here, there = workers(executor)
    executor.start(here, chain("old", 10**9))
    gate.wait()
    pool = executor.pool
    assert executor._connection is not None
    executor._connection.client.loop.add_callback(executor._connection.client.scheduler_comm.abort)
    reports = until_reports(executor, lambda seen: sum(isinstance(report, WorkerJoined) for report in seen) == 2)
    left = {report.worker: report.reason for report in reports if isinstance(report, WorkerLeft)}
    assert left == {here: "unreachable", there: "unreachable"}
    assert executor.pool == pool
    executor.start(here, chain("new", 10, 5))
    gate.open()
    reports = ended(executor, "new")
    assert outcome(reports, "new").outcome == "done"
    assert [report.metrics["total"] for report in reached(reports, "new") if report.metrics] == [5.0, 10.0]
    assert not [report for report in reports if isinstance(report, ChainEnded) and report.chain == "old"]
