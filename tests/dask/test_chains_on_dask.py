"""Chains on real worker processes: the contract of executors, and what only a cluster has."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client

from hpstage.cluster import DaskExecutor
from hpstage.errors import InternalError
from hpstage.executor import Executor
from hpstage.plan.facts import WorkerId
from hpstage.testing import ExecutorContract
from hpstage.testing.chains import chain, ended, key, outcome, reached, workers
from hpstage.testing.toys import Counter, Gate
from tests.dask.conftest import Run

pytestmark = pytest.mark.sampled(8)

Open = Callable[..., DaskExecutor]


class TestDaskExecutor(ExecutorContract):
    n_workers = 2

    @pytest.fixture
    def make_executor(self, client: Client) -> Callable[[], DaskExecutor]:
        client.wait_for_workers(self.n_workers, timeout=120)
        return lambda: DaskExecutor(client)

    @pytest.fixture
    def executor(self, run: Run) -> DaskExecutor:
        """The same for most tests: to open one takes seconds."""
        self.run = run
        return run.executor

    def everyone(self, executor: Executor) -> list[WorkerId]:
        run = getattr(self, "run", None)
        return run.workers if run is not None and executor is run.executor else super().everyone(executor)

    def settle(self, executor: Executor) -> None:
        assert isinstance(executor, DaskExecutor) and executor._courier is not None
        while executor._courier._waiting:
            time.sleep(0.001)


def test_two_workers_train_concurrently_in_separate_processes(run: Run) -> None:
    executor, (here, there) = run.executor, run.workers
    run.gate.shut()
    executor.start(here, chain("a", 2))
    run.gate.wait()
    executor.start(there, chain("b", 2))
    run.gate.open()
    reports = ended(executor, "a", "b")
    pids = {r.metrics["pid"] for name in "ab" for r in reached(reports, name) if r.metrics}
    assert len(pids) == 2


def test_a_worker_fetches_the_state_it_needs_next_before_the_chain_starts(run: Run) -> None:
    executor, (here, there) = run.executor, run.workers
    executor.start(here, chain("a", 10))
    executor.start(there, chain("b", 2))
    ended(executor, "a", "b")
    executor.expect(there, [key(10)])
    assert executor._courier is not None
    while executor._courier._waiting:
        time.sleep(0.001)
    executor.start(there, chain("c", 20, start=10))
    [last] = reached(ended(executor, "c"), "c")
    assert last.source == "live", "only the other worker has trained it"


@pytest.mark.ci
def test_reports_lost_by_the_event_feed_arrive_with_the_result_of_the_chain(open_executor: Open) -> None:
    executor = open_executor()
    worker = workers(executor)[0]
    assert executor._connection is not None
    executor._connection.client.unsubscribe_topic(executor._name)
    executor._connection.client.run(_nothing)  # the scheduler has handled what came before it
    executor.start(worker, chain("c", 30, 10, 20))
    reports = ended(executor, "c")
    assert [r.step for r in reached(reports, "c")] == [10, 20, 30]
    assert outcome(reports, "c").outcome == "done"


def _nothing() -> None:
    pass


class Unloadable:
    """Stands for a bug of ours: it raises where no code of the user's runs."""

    def __reduce__(self) -> tuple[object, ...]:
        return _fall_over, ()


def _fall_over() -> None:
    raise ZeroDivisionError("a bug of ours")


@pytest.mark.ci
def test_a_bug_of_hpstage_on_a_worker_raises_an_internal_error_in_the_driver(open_executor: Open) -> None:
    executor = open_executor()
    worker = workers(executor)[0]
    executor.use(Unloadable())  # type: ignore[arg-type]
    executor.start(worker, chain("c", 5))
    with pytest.raises(InternalError, match="a bug of ours"):
        ended(executor, "c")


def test_closing_the_executor_leaves_the_client_usable_and_nothing_on_the_workers(
    open_executor: Open, client: Client, tmp_path: Path
) -> None:
    before = client.run(_traces)
    gate = Gate(tmp_path)
    gate.shut()
    executor = open_executor(Counter(gate))
    worker = workers(executor)[0]
    executor.start(worker, chain("c", 10**9))
    gate.wait()
    executor.close()
    gate.open()
    # The worker has one thread: it is free when the chain has stopped.
    assert client.submit(pow, 2, 5, workers=[worker], pure=False).result(timeout=120) == 32
    assert client.run(_traces) == before
    executor.close()


def _traces(dask_worker: object) -> tuple[list[str], list[str], list[str]]:
    names = (dask_worker.plugins, dask_worker.handlers, dask_worker.executors)  # type: ignore[attr-defined]
    plugins, handlers, executors = (sorted(name for name in known if "hpstage" in name) for known in names)
    return plugins, handlers, executors
