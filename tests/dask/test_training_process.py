"""The process that a run trains in: what it finds, what it is spared, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Worker

from hpstage.checkpoints import FolderCheckpoints
from hpstage.cluster import DaskExecutor
from hpstage.errors import ClusterError, UsageError
from hpstage.plan.facts import WorkerId
from hpstage.plan.messages import BoundaryReached, ChainEnded, WorkerJoined, WorkerLeft
from hpstage.testing.chains import chain, ended, outcome, reached, until, workers
from hpstage.testing.toys import Counter, Gate
from tests.dask.conftest import Run
from tests.dask.oddities import Curious, Exiting, Killed, Leaving, Once
from tests.dask.processes import Processes, is_running
from tests.dask.processes import until as until_true
from tests.unit.searches import failures_after

pytestmark = pytest.mark.sampled(8)

Open = Callable[..., DaskExecutor]


def pid_of(executor: DaskExecutor, worker: Any, name: str) -> int:
    """The process that trains on a worker, as a chain of one step reports it."""
    executor.start(worker, chain(name, 1))
    [report] = reached(ended(executor, name), name)
    assert report.metrics is not None
    return int(report.metrics["pid"])


def gone(pid: int) -> None:
    until_true(lambda: not is_running(pid), f"the end of process {pid}")


@pytest.mark.ci
def test_a_training_process_has_memory_settings_one_thread_variables_and_script_arguments(
    client: Client, client_of_nannies: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mark() -> None:
        os.environ["HPSTAGE_TEST_HERE"] = os.getcwd()

    client_of_nannies.run(mark)
    monkeypatch.setattr(sys, "argv", ["script.py", "--width", "3"])
    monkeypatch.setenv("HPSTAGE_TEST_HERE", os.getcwd())  # of local workers
    for one in (client, client_of_nannies):
        executor = DaskExecutor(one)
        executor.open(Curious(), FolderCheckpoints(tmp_path / "states", "w"))
        assert executor.try_out({"x": 1.0}) == dict.fromkeys(("threads", "memory", "cublas", "here", "arguments"), 1.0)
        executor.close()


@dataclass(frozen=True)
class Place:
    """A worker of two threads, and a folder in which it finds modules."""

    cluster: Processes
    client: Client
    worker: str
    modules: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder, modules = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("modules")
    path = os.pathsep.join([str(modules), os.environ.get("PYTHONPATH", "")])
    with Processes(folder, PYTHONPATH=path) as cluster:
        cluster.scheduler()
        cluster.worker("--nthreads", "2")  # of which Dask gives each run one
        with Client(cluster.address, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=120)
            [worker] = client.run(os.getpid)
            yield Place(cluster, client, worker, modules)


@pytest.mark.ci
def test_the_dask_worker_process_does_not_import_the_users_code(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.modules / "my_own.py").write_text("from hpstage.testing.toys import Counter\nclass Mine(Counter): pass\n")
    monkeypatch.syspath_prepend(str(place.modules))
    from my_own import Mine  # type: ignore[import-not-found]

    executor = DaskExecutor(place.client)
    executor.open(Mine(), FolderCheckpoints(tmp_path / "states", "w"))
    executor.start(*workers(executor, 1), chain("c", 3))
    assert outcome(ended(executor, "c"), "c").outcome == "done"
    assert place.client.run(lambda: "my_own" in sys.modules) == {place.worker: False}
    executor.close()


@pytest.mark.ci
def test_a_new_run_trains_the_current_code_of_edited_files(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that run for days have imported nothing that could grow old."""
    module = tmp_path / "gains.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    totals = []
    for gain in (1, 100):
        module.write_text(
            "from hpstage.testing.toys import Counter\n"
            "class Gained(Counter):\n"
            "    def evaluate(self):\n"
            f"        return {{'total': {gain} * self.total}}\n"
        )
        place.client.upload_file(str(module))
        sys.modules.pop("gains", None)
        from gains import Gained  # type: ignore[import-not-found]

        executor = DaskExecutor(place.client)
        executor.open(Gained(), FolderCheckpoints(tmp_path / f"states-{gain}", "w"))
        executor.start(*workers(executor, 1), chain("c", 3))
        [report] = reached(ended(executor, "c"), "c")
        assert report.metrics is not None
        totals.append(report.metrics["total"])
        executor.close()
    assert totals == [3.0, 300.0]


def test_a_killed_training_process_is_replaced_and_its_dask_worker_survives(run: Run, client: Client) -> None:
    before = client.run(os.getpid)
    executor, worker = run.executor, run.workers[0]
    run.gate.shut(1)
    first = pid_of(executor, worker, "first")
    executor.start(worker, chain("c", 5))
    run.gate.wait()
    os.kill(first, signal.SIGKILL)
    reports = until(executor, lambda seen: any(isinstance(report, WorkerJoined) for report in seen), 60)
    [left] = [report for report in reports if isinstance(report, WorkerLeft)]
    assert (left.worker, left.reason) == (worker, "died")
    assert left.message.startswith("its training process was killed by SIGKILL")
    assert not [report for report in reports if isinstance(report, ChainEnded)]
    run.gate.open()
    second = pid_of(executor, worker, "second")
    assert second != first
    assert client.run(os.getpid) == before, "the worker itself survived"


def test_a_training_process_killed_while_idle_is_replaced(run: Run) -> None:
    executor, worker = run.executor, run.workers[0]
    first = pid_of(executor, worker, "first")
    os.kill(first, signal.SIGKILL)
    until(executor, lambda seen: any(isinstance(report, WorkerJoined) for report in seen), 60)
    assert pid_of(executor, worker, "second") != first


def test_the_message_of_a_lost_worker_names_the_exit_status_or_signal_of_its_process(open_executor: Open) -> None:
    executor = open_executor(Leaving())
    ends = {3: "left with exit status 3", -11: "was killed by SIGSEGV"}
    for worker, x in zip(workers(executor), ends, strict=True):
        executor.start(worker, chain(f"c{x}", 5, x=x))
    reports = until(executor, lambda seen: sum(isinstance(report, WorkerLeft) for report in seen) == len(ends), 60)
    messages = [report.message for report in reports if isinstance(report, WorkerLeft)]
    assert all(any(how in message for message in messages) for how in ends.values()), messages


def test_a_training_process_that_exits_during_setup_raises_an_error_with_its_status(client: Client) -> None:
    with pytest.raises(UsageError, match=r"the training process left with exit status 7 while it was set up"):
        DaskExecutor(client).open(Exiting(), None)


def test_a_worker_whose_training_processes_are_killed_during_setup_is_not_used(
    client_of_nannies: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = DaskExecutor(client_of_nannies)
    executor.open(Killed(tmp_path / "mark"), None)
    assert executor.present == len(client_of_nannies.scheduler_info(n_workers=-1)["workers"]) - 1
    assert "is not used: the trainable cannot be set up on worker" in caplog.text
    executor.close()
    for how in ("SIGKILL", "SIGTERM"):
        with pytest.raises(ClusterError, match=rf"{how} .*while it was set up.*run the same command again"):
            DaskExecutor(client_of_nannies).open(Killed(how=getattr(signal, how)), None)


def test_a_training_process_killed_once_during_setup_is_started_again(
    client_of_nannies: Client, tmp_path: Path
) -> None:
    client = client_of_nannies
    executor = DaskExecutor(client)
    executor.open(Once(tmp_path / "killed"), None)
    assert len(list(tmp_path.iterdir())) == len(client.scheduler_info(n_workers=-1)["workers"])
    executor.close()


def test_a_training_process_ignores_sigint_and_sigterm(run: Run) -> None:
    executor, worker = run.executor, run.workers[0]
    run.gate.shut(1)
    pid = pid_of(executor, worker, "first")
    executor.start(worker, chain("c", 5))
    run.gate.wait()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    run.gate.open()
    reports = ended(executor, "c")
    assert outcome(reports, "c").outcome == "done"
    assert pid_of(executor, worker, "last") == pid


@pytest.mark.ci
def test_closing_the_executor_ends_its_training_processes(open_executor: Open, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.shut(1)
    executor = open_executor(Counter(gate))
    here, there = workers(executor)
    pids = [pid_of(executor, worker, f"first-{worker}") for worker in (here, there)]
    executor.start(here, chain("c", 5))
    gate.wait()
    executor.close()  # one is at rest, the other in a step that does not end
    for pid in pids:
        gone(pid)


@pytest.mark.ci
@pytest.mark.parametrize(
    "numbers", [[signal.SIGKILL, signal.SIGTERM], pytest.param([signal.SIGSEGV], marks=pytest.mark.slow)]
)
def test_no_training_process_outlives_its_worker(tmp_path: Path, numbers: list[signal.Signals]) -> None:
    gate = Gate(tmp_path)
    gate.shut(1)
    with Processes(tmp_path) as cluster:
        cluster.scheduler()
        processes = [cluster.worker() for _ in numbers]
        with Client(cluster.address, set_as_default=False) as client:
            client.wait_for_workers(len(numbers), timeout=120)
            executor = DaskExecutor(client)
            executor.open(Counter(gate), FolderCheckpoints(tmp_path / "states", "w"))
            found = workers(executor, len(numbers))
            pids = [pid_of(executor, worker, f"first-{worker}") for worker in found]
            for worker in found:
                executor.start(worker, chain(f"c-{worker}", 5, 1))
            until(executor, lambda seen: sum(isinstance(report, BoundaryReached) for report in seen) == len(numbers))
            for process, number in zip(processes, numbers, strict=True):
                process.send_signal(number)
            for pid in pids:
                gone(pid)
            until(executor, lambda seen: sum(isinstance(report, WorkerLeft) for report in seen) == len(numbers), 60)
            executor.close()


def tasks(dask_worker: Worker) -> int:
    return len(dask_worker.state.executing)


@pytest.mark.ci
def test_two_runs_on_one_worker_train_in_turn(place: Place, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.shut()
    runs = []
    for number, its_gate in enumerate((gate, None)):
        executor = DaskExecutor(place.client)
        executor.open(Counter(its_gate), FolderCheckpoints(tmp_path / f"states-{number}", "w"))
        runs.append((executor, workers(executor, 1)[0]))
    (first, worker), (second, _) = runs
    first.start(worker, chain("held", 5))
    gate.wait()
    second.start(worker, chain("waits", 5))
    until_true(lambda: place.client.run(tasks)[worker] == 2, "both tasks are with the worker")
    assert second.wait(0.0) == []
    gate.open()
    held, waited = ended(first, "held"), ended(second, "waits")
    for executor, _ in runs:
        executor.close()
    assert reached(waited, "waits")[0].at > reached(held, "held")[0].at
    pids = {r.metrics["pid"] for r in (*reached(held, "held"), *reached(waited, "waits")) if r.metrics}
    assert len(pids) == 2


def test_the_failure_of_a_stage_lists_the_exit_status_of_each_process_that_died() -> None:
    [failed] = failures_after(
        WorkerLeft(WorkerId("w"), number + 0.5, "died", f"its training process left with exit status {number}")
        for number in range(3)
    )
    for number in range(3):
        assert f"its training process left with exit status {number}" in failed.failure.traceback
