"""Who uses a cluster's workers: those that join in the middle, and several drivers at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from ast import literal_eval
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from distributed import Client, LocalCluster

from hpstage.plan.facts import (
    ChainClosed,
    ChainId,
    ChainStarted,
    DriverId,
    DriverJoined,
    DriverLeft,
    Fact,
    StateReached,
    WorkerId,
)
from hpstage.plan.log import read_facts
from hpstage.store import SQLiteJournal
from tests.dask.processes import Processes, end, until
from tests.dask.steady import Steady, hold
from tests.dask.studies import INTERVAL, Running, Trials, steps_by_process, trials, undisturbed

SLACK = 8  # steps of chains that were stopped when all they were for had been reached


@pytest.mark.ci
def test_a_worker_that_joins_during_a_study_is_used_immediately(tmp_path: Path) -> None:
    expected, unique = undisturbed()
    with Processes(tmp_path) as cluster:
        cluster.scheduler()
        first = cluster.worker()
        with Client(cluster.address, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=30)
            study = Running(Steady(tmp_path, 0.0, partial(hold, str(tmp_path / "go"))), client, tmp_path)
            until((tmp_path / "victim").exists, "the first worker stands still")
            trained = steps_by_process(tmp_path)
            second = cluster.worker()
            until(lambda: steps_by_process(tmp_path).get(second.pid, 0) >= INTERVAL, "the second worker trains")
            assert trained == {first.pid: steps_by_process(tmp_path)[first.pid]}
            (tmp_path / "go").touch()
            result = study.result()
    assert trials(result.study) == expected
    assert sum(steps_by_process(tmp_path).values()) == unique


@pytest.mark.ci
def test_steps_of_a_worker_that_received_sigterm_are_not_trained_again(tmp_path: Path) -> None:
    expected, unique = undisturbed()
    with Processes(tmp_path) as cluster:
        cluster.scheduler()
        first, second = cluster.supervised_worker(), cluster.supervised_worker()
        with Client(cluster.address, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
            study = Running(Steady(tmp_path, 0.05), client, tmp_path)
            until(lambda: steps_by_process(tmp_path).get(first.pid, 0) > INTERVAL, "the first worker trains")
            first.terminate()
            result = study.result()
            first.wait(60)
    assert trials(result.study) == expected
    trained = steps_by_process(tmp_path)
    assert set(trained) == {first.pid, second.pid}
    assert sum(trained.values()) == unique


def drive(
    processes: Processes, scheduler: str, folder: Path, name: str, seed: int, seconds: float = 0.01, drivers: int = 1
) -> subprocess.Popen[bytes]:
    """Search in a process of its own; one step of it waits until so many ``drivers`` have joined the plan."""
    folder.mkdir(exist_ok=True)
    words = [scheduler, str(folder), name, str(seed), str(seconds), str(drivers)]
    return processes.start(sys.executable, "-m", "tests.dask.studies", *words)


def found(folder: Path, name: str) -> Trials:
    return literal_eval((folder / f"{name}.txt").read_text())


@pytest.mark.ci
def test_two_drivers_of_one_plan_share_the_workers_of_one_cluster(nannies: LocalCluster, tmp_path: Path) -> None:
    names = {"one": 7, "two": 8}
    expected = {name: undisturbed(seed)[0] for name, seed in names.items()}
    with Processes(tmp_path) as processes:
        drivers = [
            drive(processes, nannies.scheduler_address, tmp_path / "both", name, seed, drivers=2)
            for name, seed in names.items()
        ]
        for driver in drivers:
            assert driver.wait(150) == 0, processes.logs()
    for name, values in expected.items():
        assert found(tmp_path / "both", name) == values
    facts = written(tmp_path / "both")
    assert len({fact.driver for fact in facts if isinstance(fact, DriverJoined)}) == 2
    assert len({fact.pool for fact in facts if isinstance(fact, DriverJoined)}) == 1
    assert chains_of_two_drivers(facts) > 0, "they did not run at the same time"
    trained = sum(steps_by_process(tmp_path / "both").values())
    assert trained <= steps_counted(facts) + SLACK


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 2])
def test_two_drivers_of_one_plan_share_workers_again_after_the_scheduler_restarts(tmp_path: Path, kills: int) -> None:
    expected = {name: undisturbed(seed)[0] for name, seed in (("one", 7), ("two", 8))}
    both = tmp_path / "both"
    with Processes(tmp_path) as cluster:
        scheduler = cluster.scheduler()
        for _ in range(2):
            cluster.worker()
        drivers = [drive(cluster, cluster.address, both, name, seed, 0.06) for name, seed in (("one", 7), ("two", 8))]
        known = 0
        for _ in range(kills):
            until(lambda: sum(steps_by_process(both).values()) > known + 15, "they train")  # noqa: B023
            end(scheduler)
            known = sum(steps_by_process(both).values())
            scheduler = cluster.scheduler()
            for _ in range(2):
                cluster.worker()
        for driver in drivers:
            assert driver.wait(90) == 0, cluster.logs()
    for name, values in expected.items():
        assert found(both, name) == values
    facts = written(both)
    assert len({fact.pool for fact in facts if isinstance(fact, DriverJoined)}) == 1 + kills
    chains_of_two_drivers(facts)
    trained = sum(steps_by_process(both).values())
    assert trained <= steps_counted(facts) + SLACK + kills * 2 * INTERVAL


def written(folder: Path) -> list[Fact]:
    with closing(SQLiteJournal(folder / "plan" / "plan.sqlite")) as journal:
        return list(read_facts(journal))


def chains_of_two_drivers(facts: list[Fact]) -> int:
    """Chains started while both drivers were there; fails where one was started on a worker that was not idle.

    The journal's order is that of what happened.
    """
    runs: dict[WorkerId, ChainId] = {}
    present: set[DriverId] = set()
    concurrent = 0
    for fact in facts:
        match fact:
            case DriverJoined():
                present.add(fact.driver)
            case DriverLeft():
                present.remove(fact.driver)
            case ChainStarted():
                assert fact.worker not in runs, f"{fact.chain} was started next to {runs[fact.worker]}"
                runs[fact.worker] = fact.chain
                concurrent += len(present) == 2
            case ChainClosed():
                runs = {worker: chain for worker, chain in runs.items() if chain != fact.chain}
    return concurrent


def steps_counted(facts: list[Fact]) -> int:
    """Steps that were reported; fails where one was reported twice."""
    reached = [fact for fact in facts if isinstance(fact, StateReached)]
    steps = [(fact.node, step) for fact in reached for step in range(fact.start, fact.step)]
    assert len(set(steps)) == len(steps)
    return len(steps)


@pytest.mark.ci
def test_two_workloads_take_turns_on_the_workers_of_one_cluster(client_of_nannies: Client, tmp_path: Path) -> None:
    client = client_of_nannies
    expected, unique = undisturbed()
    client.wait_for_workers(2, timeout=120)
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    studies = [Running(Steady(folder, 0.01), client, folder) for folder in folders]
    for study, folder in zip(studies, folders, strict=True):
        assert trials(study.result().study) == expected
        assert sum(steps_by_process(folder).values()) == unique
    # Which of them a study comes to train on, hangs on who was quicker.
    workers = set(client.run(os.getpid).values())
    assert {worker for folder in folders for worker in steps_by_process(folder)} == workers
