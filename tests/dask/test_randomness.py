"""What lives in a Dask worker's process draws random numbers; a training step does not notice."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client

from hpstage.cluster import local_cluster
from hpstage.store import MemoryJournal
from tests.dask.draws import Trials, differing, found, inline, keep_drawing, search
from tests.dask.processes import Processes, until

SEEDS = (5, 6)


@pytest.fixture(scope="module")
def expected() -> dict[int, Trials]:
    """Each seed's study in one process, where nobody else draws."""
    return {seed: inline(seed) for seed in SEEDS}


@pytest.fixture(scope="module")
def busy() -> Iterator[Client]:
    """Two workers whose event loops draw all the time."""
    with local_cluster(2, gpus=0) as cluster, Client(cluster, set_as_default=False) as client:
        client.run(keep_drawing)
        yield client


def test_a_step_sees_its_own_random_numbers_whatever_the_worker_draws(
    busy: Client, expected: dict[int, Trials]
) -> None:
    assert search(busy, MemoryJournal(), seed=5) == expected[5]


@pytest.mark.slow
def test_a_study_that_draws_is_the_same_twenty_times(
    client: Client, expected: dict[int, Trials], capsys: pytest.CaptureFixture[str]
) -> None:
    client.wait_for_workers(2, timeout=300)
    wrong = [differing(search(client, MemoryJournal(), seed=5), expected[5]) for _ in range(20)]
    with capsys.disabled():
        print(f"\ntrials of {len(expected[5])} that differ from inline, by run: {wrong}")  # noqa: T201
    assert wrong == [0] * 20


def two_studies(folder: Path, moment: float) -> list[int]:
    """Trials of each that differ where the second study joins ``moment`` seconds after the first has begun to train."""
    folder.mkdir()
    with Processes(folder) as cluster:
        cluster.scheduler()
        for _ in range(2):
            cluster.worker("--nthreads", "2")
        drivers = []
        for seed in SEEDS:
            drivers.append(
                cluster.start(
                    sys.executable, "-m", "tests.dask.draws", cluster.address, str(folder), f"study-{seed}", str(seed)
                )
            )
            if seed == SEEDS[0]:
                until(lambda: (folder / "plan" / "plan.sqlite").exists(), "the first study has a plan")
                threading.Event().wait(moment)
        for driver in drivers:
            assert driver.wait(90) == 0, cluster.logs()
    return [differing(found(folder, f"study-{seed}"), inline(seed)) for seed in SEEDS]


def test_two_studies_on_one_cluster_and_store_do_not_draw_each_others_numbers(tmp_path: Path) -> None:
    assert two_studies(tmp_path / "both", 0.2) == [0, 0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_second_study_may_come_at_any_moment_of_twenty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(0)
    wrong = [two_studies(tmp_path / str(number), chance.uniform(0.0, 1.5)) for number in range(20)]
    with capsys.disabled():
        print(f"\ntrials of each study that differ from inline, by run: {wrong}")  # noqa: T201
    assert wrong == [[0, 0]] * 20
