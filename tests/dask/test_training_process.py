"""The process that a run trains in: what it finds, what it is spared, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Worker

from hpstage.checkpoints import FolderCheckpoints
from hpstage.cluster import DaskExecutor, memory
from hpstage.errors import UsageError
from hpstage.plan.facts import WorkerId
from hpstage.plan.messages import ChainEnded, WorkerJoined, WorkerLeft
from hpstage.testing.chains import chain, ended, outcome, reached, until, wait_for, workers
from hpstage.testing.toys import Counter
from tests.dask.processes import Processes, is_running
from tests.dask.processes import until as until_true
from tests.unit.searches import failures_after

Open = Callable[..., DaskExecutor]


def pid_of(executor: DaskExecutor, worker: Any, name: str) -> int:
    """The process that trains on a worker, as a chain of one step tells."""
    executor.start(worker, chain(name, 1))
    [report] = reached(ended(executor, name), name)
    assert report.metrics is not None
    return int(report.metrics["pid"])


def gone(pid: int) -> None:
    until_true(lambda: not is_running(pid), f"the end of process {pid}")


class Curious(Counter):
    """Tells in its metrics what its process finds, as 1 or 0."""

    def evaluate(self) -> dict[str, float]:
        found = {
            "threads": {os.environ[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS")} == {"1"},
            "memory": memory.ENVIRONMENT.items() <= os.environ.items(),
            "here": os.environ.get("HPSTAGE_TEST_HERE") == os.getcwd(),
        }
        return {name: float(value) for name, value in found.items()}


def test_it_keeps_freed_memory_has_one_thread_for_each_library_and_the_workers_variables_and_folder(
    open_executor: Open, client: Client
) -> None:
    def mark() -> None:
        os.environ["HPSTAGE_TEST_HERE"] = os.getcwd()

    client.run(mark)
    metrics = open_executor(Curious()).try_out({"x": 1.0})
    assert metrics == {"threads": 1.0, "memory": 1.0, "here": 1.0}


def test_the_workers_own_process_imports_neither_the_users_code_nor_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own.py").write_text(
        "import torch\nfrom hpstage.testing.toys import Counter\nclass Mine(Counter): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from my_own import Mine  # type: ignore[import-not-found]

    def imported() -> list[str]:
        return sorted({"torch", "my_own"} & set(sys.modules))

    with Processes(tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])) as cluster:
        cluster.scheduler()
        cluster.worker()
        with Client(cluster.address, set_as_default=False) as client:
            executor = DaskExecutor(client)
            executor.open(Mine(), FolderCheckpoints(tmp_path / "states", "w"))
            [worker] = workers(executor, 1)
            executor.start(worker, chain("c", 3))
            assert outcome(ended(executor, "c"), "c").outcome == "done"
            assert client.run(imported) == {worker: []}
            executor.close()


def test_a_new_run_trains_what_the_files_say_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that go on for days have imported nothing that could grow old."""
    module = tmp_path / "gains.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    totals = []
    with Processes(tmp_path) as cluster:
        cluster.scheduler()
        cluster.worker()
        with Client(cluster.address, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=300)
            for gain in (1, 100):
                module.write_text(
                    "from hpstage.testing.toys import Counter\n"
                    "class Gained(Counter):\n"
                    "    def evaluate(self):\n"
                    f"        return {{'total': {gain} * self.total}}\n"
                )
                client.upload_file(str(module))
                sys.modules.pop("gains", None)
                from gains import Gained  # type: ignore[import-not-found]

                executor = DaskExecutor(client)
                executor.open(Gained(), FolderCheckpoints(tmp_path / f"states-{gain}", "w"))
                [worker] = workers(executor, 1)
                executor.start(worker, chain("c", 3))
                [report] = reached(ended(executor, "c"), "c")
                assert report.metrics is not None
                totals.append(report.metrics["total"])
                executor.close()
    assert totals == [3.0, 300.0]


def test_one_that_is_killed_takes_its_chain_along_and_another_joins_on_the_same_worker(
    open_executor: Open, client: Client, tmp_path: Path
) -> None:
    before = client.run(os.getpid)
    executor = open_executor(Counter(tmp_path / "gate", held=1))
    worker, _ = workers(executor)
    first = pid_of(executor, worker, "first")
    executor.start(worker, chain("c", 5))
    wait_for(tmp_path / "gate.reached")
    os.kill(first, signal.SIGKILL)
    reports = until(executor, lambda seen: any(isinstance(report, WorkerJoined) for report in seen), 60)
    [left] = [report for report in reports if isinstance(report, WorkerLeft)]
    assert (left.worker, left.reason) == (worker, "died")
    assert left.message.startswith("its training process was killed by SIGKILL")
    assert not [report for report in reports if isinstance(report, ChainEnded)]
    (tmp_path / "gate").touch()
    second = pid_of(executor, worker, "second")
    assert second != first
    assert client.run(os.getpid) == before, "the worker itself went on"


def test_one_that_is_killed_while_it_has_nothing_to_do_is_replaced(open_executor: Open) -> None:
    executor = open_executor()
    worker, _ = workers(executor)
    first = pid_of(executor, worker, "first")
    os.kill(first, signal.SIGKILL)
    until(executor, lambda seen: any(isinstance(report, WorkerJoined) for report in seen), 60)
    assert pid_of(executor, worker, "second") != first


class Leaving(Counter):
    """Ends its process where the value says so: with an exit status, or by a signal (a negative number)."""

    def train(self, step: int, hp: Any) -> None:
        if hp["x"] > 0:
            os._exit(hp["x"])
        os.kill(os.getpid(), -hp["x"])


@pytest.mark.parametrize(
    ("x", "how"), [(3, "left with exit status 3"), (-11, "was killed by SIGSEGV"), (-9, "was killed by SIGKILL")]
)
def test_how_the_users_code_has_ended_it_is_told(open_executor: Open, x: int, how: str) -> None:
    executor = open_executor(Leaving())
    worker, _ = workers(executor)
    executor.start(worker, chain("c", 5, x=x))
    reports = until(executor, lambda seen: any(isinstance(report, WorkerLeft) for report in seen), 60)
    [left] = [report for report in reports if isinstance(report, WorkerLeft)]
    assert how in left.message


def test_one_that_ends_while_it_is_set_up_is_an_error_with_its_end(client: Client) -> None:
    with pytest.raises(UsageError, match=r"the training process left with exit status 7 while it was set up"):
        DaskExecutor(client).open(Exiting(), None)


class Exiting(Counter):
    """Stands for a library whose import ends the process: any but the one in which it was made (which copies it)."""

    def __init__(self) -> None:
        super().__init__()
        self.made_in = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if os.getpid() != state["made_in"]:
            os._exit(7)
        self.__dict__.update(state)


def test_one_that_somebody_kills_while_it_is_set_up_is_started_again(client: Client, tmp_path: Path) -> None:
    executor = DaskExecutor(client)
    executor.open(Once(tmp_path / "killed"), None)
    assert len(list(tmp_path.iterdir())) == len(client.scheduler_info(n_workers=-1)["workers"])
    executor.close()


class Once(Counter):
    """Its process is killed the first time that it is set up on a worker."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.made_in = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        mark = Path(f"{state['path']}-{os.getppid()}")
        if os.getpid() != state["made_in"] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.__dict__.update(state)


def test_signals_that_end_or_interrupt_others_leave_it_at_work(open_executor: Open, tmp_path: Path) -> None:
    executor = open_executor(Counter(tmp_path / "gate", held=1))
    worker, _ = workers(executor)
    pid = pid_of(executor, worker, "first")
    executor.start(worker, chain("c", 5))
    wait_for(tmp_path / "gate.reached")
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    (tmp_path / "gate").touch()
    reports = ended(executor, "c")
    assert outcome(reports, "c").outcome == "done"
    assert pid_of(executor, worker, "last") == pid


def test_none_is_left_of_a_run_that_is_closed(open_executor: Open, tmp_path: Path) -> None:
    executor = open_executor(Counter(tmp_path / "gate", held=1))
    here, there = workers(executor)
    pids = [pid_of(executor, worker, f"first-{worker}") for worker in (here, there)]
    executor.start(here, chain("c", 5))
    wait_for(tmp_path / "gate.reached")
    executor.close()  # one is at rest, the other in a step that does not end
    for pid in pids:
        gone(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_none_outlives_its_worker(tmp_path: Path, number: signal.Signals) -> None:
    with Processes(tmp_path) as cluster:
        cluster.scheduler()
        process = cluster.worker()
        with Client(cluster.address, set_as_default=False) as client:
            executor = DaskExecutor(client)
            executor.open(Counter(tmp_path / "gate", held=1), FolderCheckpoints(tmp_path / "states", "w"))
            [worker] = workers(executor, 1)
            pid = pid_of(executor, worker, "first")
            executor.start(worker, chain("c", 5))
            wait_for(tmp_path / "gate.reached")
            process.send_signal(number)
            gone(pid)
            until(executor, lambda seen: any(isinstance(report, WorkerLeft) for report in seen), 60)
            executor.close()


def tasks(dask_worker: Worker) -> int:
    return len(dask_worker.state.executing)


def test_two_runs_on_one_worker_train_by_turns(tmp_path: Path) -> None:
    with Processes(tmp_path) as cluster:
        cluster.scheduler()
        cluster.worker("--nthreads", "2")  # of which Dask gives each run one
        with Client(cluster.address, set_as_default=False) as client:
            runs = []
            for number, gate in enumerate((tmp_path / "gate", None)):
                executor = DaskExecutor(client)
                executor.open(Counter(gate), FolderCheckpoints(tmp_path / f"states-{number}", "w"))
                runs.append((executor, workers(executor, 1)[0]))
            (first, worker), (second, _) = runs
            first.start(worker, chain("held", 5))
            wait_for(tmp_path / "gate.reached")
            second.start(worker, chain("waits", 5))
            until_true(lambda: client.run(tasks)[worker] == 2, "both tasks are with the worker")
            assert second.wait(0.0) == []
            (tmp_path / "gate").touch()
            held, waited = ended(first, "held"), ended(second, "waits")
            for executor, _ in runs:
                executor.close()
    assert reached(waited, "waits")[0].at > reached(held, "held")[0].at
    pids = {r.metrics["pid"] for r in (*reached(held, "held"), *reached(waited, "waits")) if r.metrics}
    assert len(pids) == 2


def test_the_story_of_a_poisoned_stage_says_how_its_processes_ended() -> None:
    [failed] = failures_after(
        WorkerLeft(WorkerId("w"), number + 0.5, "died", f"its training process left with exit status {number}")
        for number in range(3)
    )
    for number in range(3):
        assert f"its training process left with exit status {number}" in failed.failure.traceback
