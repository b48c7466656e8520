"""Who uses a cluster's workers: those that join in the middle, and several drivers at a time."""

from __future__ import annotations

import sys
import time
from ast import literal_eval
from contextlib import closing
from functools import partial
from pathlib import Path

from distributed import Client

from hpstage.driver import read_facts
from hpstage.events import ChainClosed, ChainId, ChainStarted, DriverJoined, DriverLeft, StateReached, WorkerId
from hpstage.store import SQLiteJournal
from tests.dask.processes import Processes, until
from tests.dask.studies import INTERVAL, Running, Steady, Trials, steps_by_process, trials, undisturbed


def hold(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)


def test_a_worker_that_joins_in_the_middle_of_a_study_is_used_at_once(tmp_path: Path) -> None:
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


def drive(cluster: Processes, folder: Path, name: str, seed: int, seconds: float = 0.01):
    folder.mkdir(exist_ok=True)
    return cluster.start(
        sys.executable, "-m", "tests.dask.studies", cluster.address, str(folder), name, str(seed), str(seconds)
    )


def found(folder: Path, name: str) -> Trials:
    return literal_eval((folder / f"{name}.txt").read_text())


def test_two_drivers_of_one_plan_share_the_workers_of_one_cluster(tmp_path: Path) -> None:
    expected = {name: undisturbed(seed)[0] for name, seed in (("one", 7), ("two", 8))}
    with Processes(tmp_path) as cluster:
        cluster.scheduler()
        cluster.worker()
        cluster.worker()
        drivers = [drive(cluster, tmp_path / "both", "one", 7), drive(cluster, tmp_path / "both", "two", 8)]
        for driver in drivers:
            assert driver.wait(60) == 0, cluster.logs()
    for name, values in expected.items():
        assert found(tmp_path / "both", name) == values
    with closing(SQLiteJournal(tmp_path / "both" / "plan" / "plan.sqlite")) as journal:
        facts = list(read_facts(journal))
    joined = [fact for fact in facts if isinstance(fact, DriverJoined)]
    assert len(joined) == 2
    assert joined[0].pool == joined[1].pool
    # The journal's order is that of what happened: nobody claims a worker whose chain is not over.
    runs: dict[WorkerId, ChainId] = {}
    both = 0
    present: set[str] = set()
    for fact in facts:
        match fact:
            case DriverJoined():
                present.add(fact.driver)
            case DriverLeft():
                present.remove(fact.driver)
            case ChainStarted():
                assert fact.worker not in runs, f"{fact.chain} was started beside {runs[fact.worker]}"
                runs[fact.worker] = fact.chain
                both += len(present) == 2
            case ChainClosed():
                runs = {worker: chain for worker, chain in runs.items() if chain != fact.chain}
    assert both > 0, "they did not run at the same time"
    trained = sum(steps_by_process(tmp_path / "both").values())
    counted = sum(fact.step - fact.start for fact in facts if isinstance(fact, StateReached))
    assert trained <= counted + 8


def test_two_workloads_take_turns_on_the_workers_of_one_cluster(tmp_path: Path) -> None:
    expected, unique = undisturbed()
    folders = [tmp_path / "here", tmp_path / "there"]
    with Processes(tmp_path) as cluster:
        cluster.scheduler()
        workers = {cluster.worker().pid, cluster.worker().pid}
        drivers = [drive(cluster, folder, "study", 7) for folder in folders]
        for driver in drivers:
            assert driver.wait(60) == 0, cluster.logs()
    for folder in folders:
        assert found(folder, "study") == expected
        assert sum(steps_by_process(folder).values()) == unique
        assert set(steps_by_process(folder)) == workers
