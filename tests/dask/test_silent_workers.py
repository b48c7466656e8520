"""Workers that fall silent and come back: frozen ones, and ones whose traffic is cut."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from distributed import Client

from hpstage.checkpoints import FolderCheckpoints
from hpstage.plan.facts import StateReached
from tests.dask.processes import Processes, until
from tests.dask.steady import Steady, freeze
from tests.dask.studies import Running, Trials, steps_by_process, trials, undisturbed

pytestmark = pytest.mark.slow  # a worker is given seconds before it counts as silent

TTL = {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "3s"}


@pytest.fixture(scope="module")
def expected() -> tuple[Trials, int]:
    return undisturbed()


def check(study: Running, expected: tuple[Trials, int], folder: Path) -> None:
    """The study is what it is without any disturbance, and so is every state that was ever written."""
    result = study.result()
    assert trials(result.study) == expected[0]
    assert result.plan.totals.steps_trained == expected[1]
    kept = [fact.kept for fact in study.facts() if isinstance(fact, StateReached) and fact.kept is not None]
    states = FolderCheckpoints(folder / "states", result.plan.workload)
    assert kept
    for state in kept:
        assert states.load(state.key) is not None


def test_a_suspended_worker_is_replaced_and_ends_harmlessly_when_it_resumes(
    tmp_path: Path, expected: tuple[Trials, int]
) -> None:
    with Processes(tmp_path, **TTL) as cluster:
        cluster.scheduler()
        processes = [cluster.worker(), cluster.worker()]
        with Client(cluster.address, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=30)
            study = Running(Steady(tmp_path, 0.02, freeze), client, tmp_path)
            until((tmp_path / "victim").exists, "a worker is frozen")
            victim = int((tmp_path / "victim").read_text())
            trained = steps_by_process(tmp_path)[victim]
            until(lambda: len(client.scheduler_info(n_workers=-1)["workers"]) == 1, "it is dropped")
            assert not study.over
            os.killpg(victim, signal.SIGCONT)
            check(study, expected, tmp_path)
            [process] = [process for process in processes if process.pid == victim]
            until(lambda: process.poll() is not None, "the process that was dropped ends")
    steps = steps_by_process(tmp_path)
    assert steps[victim] <= trained + 2  # the step it was training, and one more until it receives the stop


@contextmanager
def apart(name: str) -> Iterator[tuple[str, str]]:
    """A network namespace that is joined to this one by a wire of its own: its address here, and the wire's name."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip")
    here, there = f"{name}-a", f"{name}-b"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"no network namespaces here: {made.stderr}")
    try:
        for command in (
            f"ip link add {here} type veth peer name {there} netns {name}",
            f"ip addr add 10.213.7.1/30 dev {here}",
            f"ip link set {here} up",
            f"ip -n {name} addr add 10.213.7.2/30 dev {there}",
            f"ip -n {name} link set {there} up",
            f"ip -n {name} link set lo up",
        ):
            subprocess.run(command.split(), check=True, capture_output=True)
        yield "10.213.7.1", here
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def test_a_worker_with_a_cut_network_connection_is_replaced_and_ends(
    tmp_path: Path, expected: tuple[Trials, int]
) -> None:
    name = f"hps{os.getpid()}"
    config = {**TTL, "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "12s"}
    with apart(name) as (address, wire), Processes(tmp_path, host=address, **config) as cluster:
        cluster.scheduler()
        distant = cluster.worker(within=["ip", "netns", "exec", name])
        with Client(cluster.address, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=30)
            study = Running(Steady(tmp_path, 0.02), client, tmp_path)
            until(lambda: len(study.reached()) >= 2, "it trains")
            subprocess.run(["ip", "link", "set", wire, "down"], check=True)
            cluster.worker()
            check(study, expected, tmp_path)
            until(lambda: distant.poll() is not None, "the worker that was cut off ends")
    assert len(steps_by_process(tmp_path)) == 2
