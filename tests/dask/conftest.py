from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import dask.config
import pytest
from distributed import Client, LocalCluster

from hpstage.checkpoints import FolderCheckpoints
from hpstage.cluster import DaskExecutor, fork_server, local_cluster
from hpstage.plan.facts import WorkerId
from hpstage.testing.chains import workers
from hpstage.testing.toys import Counter, Gate
from tests.dask.commands import Command, children, has_ended, until

Open = Callable[..., DaskExecutor]
Start = Callable[..., Command]


def _loops() -> set[threading.Thread]:
    """The threads in which Dask's event loops run; each cost time as long as it runs."""
    return {thread for thread in threading.enumerate() if thread.name == "IO loop"}


_shared: set[threading.Thread] = set()


def leave_loops() -> None:
    """Expect the loops that run now to outlive their file."""
    _shared.update(_loops())


@pytest.fixture(scope="module", autouse=True)
def no_loop_is_left() -> Iterator[None]:
    before = _loops()
    yield
    until(lambda: _loops() <= before | _shared, "the clusters and clients of this file are closed")


@pytest.fixture
def nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the fork server of a cluster that the test starts import no more than each training process needs: a process
    of tests has imported torch and much else, which takes a server five seconds, and toys need none of it."""
    monkeypatch.setattr(fork_server, "_imported", list)


_ADAPTERS = ("hpstage.torch.lightning", "hpstage.torch.skorch", "hpstage.torch.stable", "hpstage.torch.transformers")
"""What a process of tests has imported of libraries that no training on the shared cluster needs ahead."""


@pytest.fixture(scope="package")
def cluster() -> Iterator[LocalCluster]:
    names = [name for name in fork_server._imported() if not name.startswith(_ADAPTERS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "_imported", lambda: names)
        cluster = local_cluster(2, gpus=0)
    with cluster:
        leave_loops()
        yield cluster


@pytest.fixture(scope="package")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture(scope="package")
def nannies() -> Iterator[LocalCluster]:
    """A cluster as Dask starts it: each worker is a process, with another one that starts it again."""
    # Else Dask gives up a worker that is not back within 15 seconds, as on a loaded machine.
    patient = dask.config.set({"distributed.deploy.lost-worker-timeout": "10 minutes"})
    with (
        patient,
        LocalCluster(n_workers=2, threads_per_worker=1, memory_limit=0, dashboard_address="127.0.0.1:0") as own,
    ):
        leave_loops()
        yield own


@pytest.fixture(scope="package")
def client_of_nannies(nannies: LocalCluster) -> Iterator[Client]:
    with Client(nannies, set_as_default=False) as client:
        yield client


@dataclass(frozen=True)
class Run:
    """An executor on the two workers of the shared cluster, which train a Counter with this gate."""

    executor: DaskExecutor
    workers: list[WorkerId]
    gate: Gate


@pytest.fixture(scope="module")
def shared_run(client: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    client.wait_for_workers(2, timeout=120)
    gate = Gate(tmp_path_factory.mktemp("gate"))
    executor = DaskExecutor(client)
    executor.open(Counter(gate), None)
    yield Run(executor, workers(executor), gate)
    executor.close()


@pytest.fixture
def run(shared_run: Run, tmp_path: Path) -> Iterator[Run]:
    """For a test that leaves the run as it was: with checkpoints of this test, and nothing that trains."""
    executor = shared_run.executor
    executor.use(FolderCheckpoints(tmp_path / "states", "w"))
    yield shared_run
    # Also where the test has failed.
    shared_run.gate.open()
    for chain in list(executor._futures):
        executor.stop(chain)
    until(lambda: not executor._futures, "all chains have ended")
    executor.wait(0.0)


@pytest.fixture
def open_executor(client: Client, tmp_path: Path) -> Iterator[Open]:
    """Opens an executor on the shared cluster, with a checkpoint folder of this test; closes it at the end."""
    client.wait_for_workers(2, timeout=120)
    opened: list[DaskExecutor] = []

    def open_executor(trainable: object | None = None) -> DaskExecutor:
        executor = DaskExecutor(client)
        opened.append(executor)
        executor.open(trainable or Counter(), FolderCheckpoints(tmp_path / "states", "w"))
        return executor

    yield open_executor
    for executor in opened:
        executor.close()


@contextmanager
def starting(folder: Path) -> Iterator[Start]:
    """Starts commands; what is left of them is killed at the end."""
    started: list[Command] = []

    def start(*words: str, **variables: str) -> Command:
        started.append(Command(folder, *words, **variables))
        return started[-1]

    yield start
    for command in started:
        if command.process.poll() is None:
            left = children(command.process.pid) if sys.platform.startswith("linux") else set()
            command.process.kill()
            command.process.wait()
            for child in left:
                until(lambda child=child: has_ended(child), f"process {child} has ended")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as start:
        yield start
