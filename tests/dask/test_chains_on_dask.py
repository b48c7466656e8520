"""Chains on real worker processes: reports, orders while they run, failures."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client
from msgspec.structs import replace

from hpstage.cluster import DaskExecutor
from hpstage.errors import InternalError
from hpstage.plan.facts import ChainId
from hpstage.plan.messages import Amendment, BoundaryMissed
from tests.dask.toys import (
    Counter,
    boundary,
    chain,
    ended,
    outcome,
    reached,
    seen,
    stage,
    until,
    wait_for,
    workers,
)

Open = Callable[..., DaskExecutor]


def test_a_chain_reports_its_boundaries_in_order_and_ends_once(open_executor: Open) -> None:
    executor = open_executor()
    worker = workers(executor)[0]
    executor.start(worker, chain("c", 30, 10, 20))
    reports = ended(executor, "c")
    passed = reached(reports, "c")
    assert [(r.start, r.step, r.metrics["total"], r.worker) for r in passed if r.metrics] == [
        (0, 10, 10.0, worker),
        (10, 20, 20.0, worker),
        (20, 30, 30.0, worker),
    ]
    assert all(r.kept is not None for r in passed)
    assert outcome(reports, "c").outcome == "done"
    assert executor.wait(0.0) == []


def test_workers_are_processes_of_their_own_and_train_side_by_side(open_executor: Open, tmp_path: Path) -> None:
    executor = open_executor(Counter(tmp_path / "gate"))
    here, there = workers(executor)
    executor.start(here, chain("a", 2))
    wait_for(tmp_path / "gate.reached")
    executor.start(there, chain("b", 2))
    (tmp_path / "gate").touch()
    reports = ended(executor, "a", "b")
    pids = {r.metrics["pid"] for name in "ab" for r in reached(reports, name) if r.metrics}
    assert len(pids) == 2


def test_a_chain_goes_on_from_live_state_on_its_worker_and_from_disk_on_another(open_executor: Open) -> None:
    executor = open_executor()
    here, there = workers(executor)
    executor.start(here, chain("a", 10))
    ended(executor, "a")
    executor.start(here, chain("b", 20, start=10))
    executor.start(there, chain("c", 15, start=10))
    reports = ended(executor, "b", "c")
    [b], [c] = reached(reports, "b"), reached(reports, "c")
    assert (b.source, c.source) == ("continued", "disk")
    assert b.metrics is not None
    assert c.metrics is not None
    assert (b.metrics["total"], c.metrics["total"]) == (20.0, 15.0)


def test_a_running_chain_takes_amendments_in_the_order_in_which_they_were_given(
    open_executor: Open, tmp_path: Path
) -> None:
    executor = open_executor(Counter(tmp_path / "gate", held=5))
    worker = workers(executor)[0]
    executor.start(worker, chain("c", 10))
    wait_for(tmp_path / "gate.reached")
    for start in range(10, 100, 10):
        executor.amend(Amendment(ChainId("c"), (stage(start, start + 10),), (boundary(start + 10),)))
    executor.amend(Amendment(ChainId("c"), (), (boundary(3),)))
    assert executor._courier is not None
    while not executor._courier.idle:
        os.sched_yield()
    (tmp_path / "gate").touch()
    reports = ended(executor, "c")
    assert [r.step for r in reached(reports, "c")] == list(range(10, 101, 10))
    assert [r.step for r in reports if isinstance(r, BoundaryMissed)] == [3]
    assert outcome(reports, "c").outcome == "done"


def test_a_running_chain_stops_at_its_next_step_and_says_what_was_wasted(open_executor: Open) -> None:
    executor = open_executor()
    worker = workers(executor)[0]
    executor.start(worker, chain("c", 10**9, 10))
    reports = executor.wait(20)
    executor.stop(ChainId("c"))
    end = outcome(reports + ended(executor, "c"), "c")
    assert end.outcome == "stopped"
    assert end.step is not None
    assert end.wasted_steps == end.step - 10


def test_a_running_chain_keeps_states_by_itself_and_the_one_at_which_it_is_stopped(open_executor: Open) -> None:
    """Its steps are faster than any message; it names its states itself."""
    executor = open_executor()
    worker = workers(executor)[0]
    executor.start(worker, replace(chain("c", 10**9), keep_every=50))
    reports = until(executor, lambda heard: len(reached(heard, "c")) >= 3)
    executor.stop(ChainId("c"), keep=True)
    reports += ended(executor, "c")
    end = outcome(reports, "c")
    passed = reached(reports, "c")
    assert end.step is not None
    assert [r.step for r in passed] == sorted({*range(50, end.step + 1, 50), end.step})
    assert [r.kept.key for r in passed if r.kept is not None] == [seen().key(r.step) for r in passed]
    assert end.wasted_steps == 0
    executor.start(worker, replace(chain("d", end.step + 10, start=end.step), source=seen().key(end.step)))
    [last] = reached(ended(executor, "d"), "d")
    assert last.metrics is not None
    assert (last.source, last.metrics["total"]) == ("continued", end.step + 10)


def test_an_order_that_overtakes_its_chain_is_carried_out(open_executor: Open) -> None:
    executor = open_executor()
    worker = workers(executor)[0]
    for number in range(5):
        executor.start(worker, chain(f"c{number}", 10**9))
        executor.stop(ChainId(f"c{number}"))
        assert outcome(ended(executor, f"c{number}"), f"c{number}").outcome == "stopped"


def test_an_error_in_the_users_code_ends_its_chain_with_the_traceback_and_leaves_the_worker(
    open_executor: Open,
) -> None:
    executor = open_executor()
    worker = workers(executor)[0]
    executor.start(worker, chain("bad", 5, x="boom"))
    end = outcome(ended(executor, "bad"), "bad")
    assert end.outcome == "failed"
    assert end.failure is not None
    assert end.failure.summary == "ArithmeticError: boom at step 0"
    assert "toys.py" in end.failure.traceback
    executor.start(worker, chain("good", 5))
    assert outcome(ended(executor, "good"), "good").outcome == "done"


def test_reports_that_the_feed_has_lost_come_with_the_result(open_executor: Open) -> None:
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


def test_a_failure_of_our_own_code_on_a_worker_is_raised_and_not_silent(open_executor: Open) -> None:
    executor = open_executor()
    worker = workers(executor)[0]
    executor.use(Unloadable())  # type: ignore[arg-type]
    executor.start(worker, chain("c", 5))
    with pytest.raises(InternalError, match="a bug of ours"):
        ended(executor, "c")


def test_a_second_chain_on_a_busy_worker_is_refused(open_executor: Open, tmp_path: Path) -> None:
    executor = open_executor(Counter(tmp_path / "gate"))
    worker = workers(executor)[0]
    executor.start(worker, chain("a", 5))
    with pytest.raises(InternalError, match="not idle"):
        executor.start(worker, chain("b", 5))
    (tmp_path / "gate").touch()
    ended(executor, "a")


def test_trying_out_evaluates_untrained(open_executor: Open) -> None:
    metrics = open_executor().try_out({"x": 1.0})
    assert metrics is not None
    assert metrics["total"] == 0.0


def test_closing_leaves_the_given_client_usable_and_the_workers_as_they_were(
    open_executor: Open, client: Client, tmp_path: Path
) -> None:
    before = client.run(_traces)
    executor = open_executor(Counter(tmp_path / "gate"))
    worker = workers(executor)[0]
    executor.start(worker, chain("c", 10**9))
    wait_for(tmp_path / "gate.reached")
    executor.close()
    (tmp_path / "gate").touch()
    # The worker has one thread: it is free when the chain has stopped.
    assert client.submit(pow, 2, 5, workers=[worker], pure=False).result(timeout=120) == 32
    assert client.run(_traces) == before
    executor.close()


def _traces(dask_worker: object) -> tuple[list[str], list[str], list[str]]:
    names = (dask_worker.plugins, dask_worker.handlers, dask_worker.executors)  # type: ignore[attr-defined]
    plugins, handlers, executors = (sorted(name for name in known if "hpstage" in name) for known in names)
    return plugins, handlers, executors
