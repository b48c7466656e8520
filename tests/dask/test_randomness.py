"""What lives in a Dask worker's process draws random numbers; a training step does not notice."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from distributed import Client

from hpstage.store import MemoryJournal
from tests.dask.draws import Trials, differing, inline, search
from tests.dask.processes import Processes, until
from tests.dask.restless import keep_drawing

SEEDS = (5, 6)


@pytest.fixture(scope="module")
def expected() -> dict[int, Trials]:
    """Each seed's study in one process, where nobody else draws."""
    return {seed: inline(seed) for seed in SEEDS}


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A worker with a thread for each of two studies, whose event loop draws all the time."""
    with Processes(tmp_path_factory.mktemp("logs")) as cluster:
        cluster.scheduler()
        cluster.worker("--nthreads", "2")
        with Client(cluster.address, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=120)
            client.run(keep_drawing)
            yield client


@pytest.mark.ci
def test_random_draws_of_the_dask_worker_do_not_change_a_study(busy: Client, expected: dict[int, Trials]) -> None:
    assert search(busy, MemoryJournal(), seed=5) == expected[5]


@pytest.mark.slow
def test_a_study_with_random_training_gives_the_same_trials_in_twenty_runs(
    client: Client, expected: dict[int, Trials], capsys: pytest.CaptureFixture[str]
) -> None:
    client.wait_for_workers(2, timeout=300)
    wrong = [differing(search(client, MemoryJournal(), seed=5), expected[5]) for _ in range(20)]
    with capsys.disabled():
        print(f"\ntrials of {len(expected[5])} that differ from inline, by run: {wrong}")  # noqa: T201
    assert wrong == [0] * 20


def two_studies(client: Client, folder: Path, expected: dict[int, Trials], moment: float) -> list[int]:
    """Trials of each that differ where the second study joins ``moment`` seconds after the first has a plan."""
    studies = []
    with ThreadPoolExecutor(len(SEEDS)) as pool:
        for seed in SEEDS:
            studies.append(pool.submit(search, client, folder / "plan", name=f"study-{seed}", seed=seed))
            if seed == SEEDS[0]:
                until(lambda: (folder / "plan" / "plan.sqlite").exists(), "the first study has a plan")
                threading.Event().wait(moment)
        return [differing(study.result(150), expected[seed]) for seed, study in zip(SEEDS, studies, strict=True)]


@pytest.mark.slow
def test_two_studies_on_one_cluster_and_store_do_not_change_each_others_random_numbers(
    busy: Client, expected: dict[int, Trials], tmp_path: Path
) -> None:
    assert two_studies(busy, tmp_path, expected, 0.2) == [0, 0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_second_study_started_at_random_times_changes_no_trial_in_twenty_runs(
    busy: Client, expected: dict[int, Trials], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(0)
    wrong = [two_studies(busy, tmp_path / str(number), expected, chance.uniform(0.0, 1.5)) for number in range(20)]
    with capsys.disabled():
        print(f"\ntrials of each study that differ from inline, by run: {wrong}")  # noqa: T201
    assert wrong == [[0, 0]] * 20
