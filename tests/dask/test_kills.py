"""kill -9 of the driver and of workers, at random moments of a study, with real processes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpstage import InlineExecutor
from tests.dask.searcher import INTERVAL, search

CHAINS = 2  # one on each worker
SECONDS = 0.04  # per step: about a second of training
ROOT = Path(__file__).parents[2]
# No script, which training processes would import; and no dashboard, with which a cluster takes a second to start.
SEARCH = """
import sys
sys.modules["bokeh"] = None
from pathlib import Path
from hpstage.cluster import DaskExecutor
from tests.dask.searcher import search
search(Path(sys.argv[1]), DaskExecutor(n_workers=2, gpus=0), float(sys.argv[2]))
"""


def start(folder: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", SEARCH, str(folder), str(SECONDS)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process: subprocess.Popen[str], folder: Path) -> dict[str, object]:
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err[-5000:]
    return json.loads((folder / "found.json").read_text())


def workers(folder: Path) -> list[int]:
    """Process ids of workers that began to train."""
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("worker-*"))


def steps_trained(folder: Path) -> int:
    """Steps that workers trained, those included that are in no journal."""
    return sum(path.stat().st_size for path in folder.glob("steps-*"))


def until_training(process: subprocess.Popen[str], folder: Path, count: int = 1) -> None:
    deadline = time.monotonic() + 60
    while len(workers(folder)) < count and process.poll() is None:
        assert time.monotonic() < deadline, "no worker began to train"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("undisturbed")
    search(folder, InlineExecutor())
    found: dict[str, object] = json.loads((folder / "found.json").read_text())
    assert found["trained"] == found["unique"] == steps_trained(folder)
    return found


@pytest.mark.ci
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 13))])
def test_a_driver_killed_at_random_times_and_run_again_finishes_with_the_undisturbed_study(undisturbed, tmp_path, seed):
    rng = random.Random(seed)
    kills = 1 if seed < 3 else 3
    for _ in range(kills):
        process = start(tmp_path)
        until_training(process, tmp_path, len(workers(tmp_path)) + 1)
        time.sleep(rng.uniform(0.0, 1.0))
        process.kill()
        process.communicate()
    found = outcome(start(tmp_path), tmp_path)
    assert found["trials"] == undisturbed["trials"]
    assert found["trained"] in (undisturbed["unique"], None)
    assert steps_trained(tmp_path) <= undisturbed["unique"] + kills * CHAINS * INTERVAL


@pytest.mark.slow  # each way of dying once: tests/dask/test_deaths.py
def test_workers_killed_at_random_times_lose_only_steps_that_were_not_reported(undisturbed, tmp_path):
    rng = random.Random(11)
    process = start(tmp_path)
    until_training(process, tmp_path)
    killed = 0
    for _ in range(3):
        time.sleep(rng.uniform(0.05, 0.4))
        for pid in rng.sample(workers(tmp_path), 1):
            if process.poll() is None and alive(pid):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    found = outcome(process, tmp_path)
    assert found["trials"] == undisturbed["trials"]
    assert found["trained"] == undisturbed["unique"]
    assert killed, "the search was over before any kill"
    assert steps_trained(tmp_path) <= undisturbed["unique"] + killed * INTERVAL


def alive(pid: int) -> bool:
    """Is this process of ours still there?"""
    try:
        return b"python" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
