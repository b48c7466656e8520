"""Training processes that are forked: what they are spared, what they must not share, and when they are spawned."""

from __future__ import annotations

import _json
import asyncio
import importlib
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from distributed import LocalCluster

import hpstage
from hpstage.cluster import DaskExecutor, fork_server
from hpstage.errors import UsageError
from hpstage.executor import Environment
from hpstage.plan.facts import ChainLost
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Counter, Tape
from tests.dask.commands import children, has_ended, until
from tests.dask.processes import ROOT
from tests.dask.steady import first, is_forked
from tests.dask.test_exactness import Net

pytestmark = [pytest.mark.sampled(4), pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")]


class Looking(Counter):
    """Notes what a process draws when it unpacks this, before anything is keyed, and whether it was forked."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.place, self.made_in = str(folder).lstrip(os.sep), os.getpid()  # no path: its files would be data

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() != self.made_in:
            report = {
                "random": random.random(),
                "numpy": float(np.random.random()),
                "forked": is_forked(),
                "new": os.environ.get("HPSTAGE_TEST_NEW"),
                "order": list({f"name {number}" for number in range(20)}),
            }
            (Path(os.sep) / self.place / str(os.getpid())).write_text(json.dumps(report))


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Not that of other tests, which may have changed sys.path since it was started."""
    with hpstage.local_cluster(2, gpus=0) as workers:
        yield workers


def found(cluster: LocalCluster, folder: Path) -> list[dict[str, Any]]:
    """What the training process on each worker notes."""
    folder.mkdir()
    executor = DaskExecutor(cluster)
    executor.open(Looking(folder), None)
    executor.close()
    return [json.loads(note.read_text()) for note in folder.iterdir()]


@pytest.mark.ci
def test_forked_training_processes_of_all_searches_draw_different_random_numbers(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    reports = [*found(cluster, tmp_path / "a"), *found(cluster, tmp_path / "b")]
    assert [one["forked"] for one in reports] == [True] * 4
    for name in ("random", "numpy"):
        assert len({one[name] for one in reports}) == 4, name


@pytest.mark.ci
def test_a_training_process_is_spawned_if_an_environment_variable_has_changed(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hpstage")
    with monkeypatch.context() as patch:
        patch.setenv("HPSTAGE_TEST_NEW", "123")
        assert [(one["forked"], one["new"]) for one in found(cluster, tmp_path / "a")] == [(False, "123")] * 2
        assert "environment variables have changed since the fork server was started: HPSTAGE_TEST_NEW" in caplog.text
    assert [one["forked"] for one in found(cluster, tmp_path / "b")] == [True] * 2


def test_forked_and_spawned_processes_iterate_a_set_of_strings_in_the_same_order(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked = found(cluster, tmp_path / "a")
    monkeypatch.setenv("HPSTAGE_TEST_NEW", "123")
    spawned = found(cluster, tmp_path / "b")
    assert [one["forked"] for one in (*forked, *spawned)] == [True, True, False, False]
    assert len({tuple(one["order"]) for one in (*forked, *spawned)}) == 1


@pytest.mark.ci
@pytest.mark.usefixtures("nothing_ahead")
@pytest.mark.parametrize("name", ["KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"])
def test_a_training_process_is_forked_if_only_a_variable_set_by_a_library_has_changed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    ours, theirs = socket.socketpair()
    with closing(fork_server.ForkServer()) as server, ours, theirs:
        monkeypatch.setenv(name, "TRUE")
        forked = server.fork_and_wait([theirs.fileno(), 1, 2], "worker", variables={}, path=())
        ours.close()
        until(lambda: forked.poll() is not None, "the fork finds its channel closed")


@pytest.mark.slow  # its processes are spawned, as those of the test before
def test_a_training_process_is_spawned_if_sys_path_has_changed(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hpstage")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        assert [one["forked"] for one in found(cluster, tmp_path / "a")] == [False] * 2
        assert "sys.path has changed" in caplog.text
    assert [one["forked"] for one in found(cluster, tmp_path / "b")] == [True] * 2


@pytest.mark.ci
def test_forked_and_spawned_processes_report_the_same_environment(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def described() -> Environment:
        executor = DaskExecutor(cluster)
        with closing(executor):
            return executor.open(Net(), None)

    forked = described()
    monkeypatch.setenv("HPSTAGE_TEST_NEW", "1")
    assert described() == forked


@pytest.mark.parametrize(
    ("imported", "message"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "started 1 threads"),
        ("import ctypes; ctypes.CDLL('{folder}/libcuda.so.1')", "loaded the CUDA driver"),
    ],
)
def test_a_fork_server_with_threads_or_cuda_refuses_to_fork(
    imported: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(_json.__file__, tmp_path / "libcuda.so.1")  # any library, under that name
    (tmp_path / "imported_ahead.py").write_text(imported.format(folder=tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(fork_server, "_imported", list)  # torch takes its time
    server = fork_server.ForkServer(["imported_ahead"])
    with pytest.raises(fork_server.NotForked, match=message):
        asyncio.run(server.fork([0, 1, 2], "worker", variables={}, path=[]))
    server.close()


@pytest.mark.parametrize("name", ["optuna.study._dataframe", "optuna.importance", "optuna.storages._rdb.models"])
def test_modules_that_import_pandas_scikit_learn_or_sqlalchemy_are_not_preloaded_in_the_fork_server(name: str) -> None:
    """As after ``study.trials_dataframe()``: where pyarrow is installed, the first two start threads."""
    importlib.import_module(name)
    assert not [found for found in fork_server._imported() if found.startswith(name)]


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("name", fork_server._BUSY_WITH)
def test_an_adapter_module_is_preloaded_unless_its_library_would_start_threads(
    name: str, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    busy = fork_server._BUSY_WITH[name]
    monkeypatch.setattr(fork_server, "find_spec", lambda package: installed if package == busy else None)
    assert (name in fork_server._imported()) is not installed


@pytest.mark.parametrize(
    ("preload", "message"),
    [
        (["json"], "preload names 'json'; only hpstage.torch, numpy"),
        ((name for name in ["mine"]), "preload names 'mine'"),
        (["torch.cuda"], "preload names 'torch.cuda'"),
        ([np], "preload is .<module 'numpy'.*; give a list of packages"),
        (None, "preload is None; give a list of packages"),
        (["torchvision"], "preload names 'torchvision', but no such package is installed"),
    ],
)
def test_an_invalid_preload_argument_is_refused_by_name(
    preload: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=message):
        hpstage.local_cluster(1, gpus=0, preload=preload)


@pytest.mark.usefixtures("nothing_ahead")
def test_preload_together_with_a_running_fork_server_is_refused() -> None:
    server = fork_server.fork_server()
    assert server is not None
    with closing(server), pytest.raises(UsageError, match="preload and fork_server exclude each other"):
        hpstage.local_cluster(1, gpus=0, preload=["torch"], fork_server=server)


@pytest.mark.ci
@pytest.mark.usefixtures("nothing_ahead")
def test_killing_the_fork_server_loses_chains_but_changes_no_value_of_a_search(tmp_path: Path) -> None:
    with hpstage.local_cluster(2, gpus=0) as cluster:
        server = cluster._fork_server._process.pid
        result = searched(Killing(server, tmp_path / "killed"), executor=cluster, store=tmp_path / "store")
        assert (tmp_path / "killed").exists()
        assert values(result) == expected()
        assert any(isinstance(fact, ChainLost) for fact in result.journal)


class Killing(Tape):
    """Kills the server of its process in its fifth step, once."""

    def __init__(self, server: int, mark: Path) -> None:
        super().__init__()
        self.server, self.mark = server, str(mark).lstrip(os.sep)

    def train(self, step: int, hp: Any) -> None:
        if step == 4 and first(Path(os.sep) / self.mark):
            os.kill(self.server, signal.SIGKILL)
            threading.Event().wait()
        super().train(step, hp)


def searched(subject: Tape, **where: Any) -> hpstage.Result:
    return hpstage.optimize(
        optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)),
        subject,
        lambda trial: {"a": trial.suggest_int("a", 1, 3)},
        metric="score",
        steps=8,
        n_trials=3,
        **where,
    )


def values(result: hpstage.Result) -> list[float | None]:
    return [trial.value for trial in result.study.trials]


def expected() -> list[float | None]:
    return values(searched(Tape(), executor=hpstage.InlineExecutor(), store=MemoryJournal()))


DRIVER = """
import hpstage
from hpstage.cluster import DaskExecutor
from hpstage.testing.toys import Counter

with hpstage.local_cluster(2, gpus=0) as cluster:
    DaskExecutor(cluster).open(Counter(), None)
    print("running", flush=True)
    input()
"""


def test_the_fork_server_and_its_forks_end_when_the_search_process_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "running\n"
        [server] = children(driver.pid)
        forks = children(server)
        assert len(forks) == 2
        driver.kill()
    for pid in (server, *forks):
        until(lambda pid=pid: has_ended(pid), f"process {pid} has ended")


@pytest.mark.ci
def test_two_searches_on_a_reused_cluster_give_the_values_of_the_inline_executor(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    for number in range(2):
        assert values(searched(Tape(), executor=cluster, store=tmp_path / f"store-{number}")) == expected()
    assert cluster.status.name == "running"


class Lingering(Looking):
    """Is unpacked without end by a process that is not the first."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        while len(list((Path(os.sep) / self.place).iterdir())) > 1 and os.getpid() != self.made_in:
            time.sleep(60)


@pytest.mark.ci
def test_a_process_ended_by_closing_the_executor_during_its_setup_is_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = DaskExecutor(n_workers=1, gpus=0)
    executor.open(Lingering(tmp_path), None)
    [first_pid] = [int(note.name) for note in tmp_path.iterdir()]
    os.kill(first_pid, signal.SIGKILL)
    until(lambda: len(list(tmp_path.iterdir())) == 2, "another process")
    executor.close()
    said = [record.getMessage() for record in caplog.records]
    assert any("killed by SIGKILL" in message for message in said)
    assert not any("while it was set up" in message for message in said)
