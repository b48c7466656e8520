from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

from hpstage.checkpoints import FolderCheckpoints
from hpstage.cluster import DaskExecutor, local_cluster
from hpstage.testing.toys import Counter
from tests.dask.commands import Command, children, has_ended, until

Open = Callable[..., DaskExecutor]
Start = Callable[..., Command]


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(2, gpus=0) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster, set_as_default=False) as client:
        yield client


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


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a command; what is left of it is killed at the end."""
    started: list[Command] = []

    def start(*words: str, **variables: str) -> Command:
        started.append(Command(tmp_path, *words, **variables))
        return started[-1]

    yield start
    for command in started:
        if command.process.poll() is None:
            left = children(command.process.pid) if sys.platform.startswith("linux") else set()
            command.process.kill()
            command.process.wait()
            for child in left:
                until(lambda child=child: has_ended(child), f"process {child} has ended")
