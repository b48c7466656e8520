"""Workers that die, or fall silent, in the middle of a study: it comes to what it would have come to."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client

from hpstage.plan.facts import Departure, StageFailed, WorkerId
from hpstage.plan.messages import WorkerLeft
from hpstage.store import MemoryJournal
from tests.dask.steady import Steady, kill, kill_worker, leave, segfault
from tests.dask.studies import INTERVAL, Trials, search, steps_by_process, trials, undisturbed
from tests.unit.searches import failures_after

pytestmark = pytest.mark.sampled(4)


@pytest.fixture(scope="module")
def expected() -> tuple[Trials, int]:
    return undisturbed()


@pytest.fixture(scope="module")
def client(client_of_nannies: Client) -> Client:
    return client_of_nannies


@pytest.mark.ci
@pytest.mark.parametrize(
    "fate", [kill, sys.exit, *(pytest.param(fate, marks=pytest.mark.slow) for fate in (kill_worker, segfault, leave))]
)
def test_a_worker_that_dies_in_training_costs_only_the_steps_since_the_last_boundary(
    client: Client, tmp_path: Path, expected: tuple[Trials, int], fate: Callable[[], object]
) -> None:
    client.wait_for_workers(2, timeout=30)
    result = search(Steady(tmp_path, 0.005, fate), client, MemoryJournal(), tmp_path / "states")
    assert trials(result.study) == expected[0]
    assert result.plan.totals.steps_trained == expected[1]
    assert sum(steps_by_process(tmp_path).values()) <= expected[1] + INTERVAL
    victim = int((tmp_path / "victim").read_text())
    assert (victim in client.run(os.getpid).values()) == (fate is not kill_worker), "a worker outlives what it trains"


def lose_worker(reason: Departure, times: int) -> list[StageFailed]:
    """What becomes of a trial whose first stage loses its worker so many times."""
    return failures_after(WorkerLeft(WorkerId(f"w{number}"), number + 0.5, reason) for number in range(times))


def test_a_stage_fails_after_three_workers_have_died_while_training_it() -> None:
    assert not lose_worker("died", 2)
    [failure] = lose_worker("died", 3)
    assert "3 workers died in a row" in failure.failure.summary


@pytest.mark.parametrize("reason", ["closed", "unreachable"])
def test_a_stage_does_not_fail_when_workers_leave_cleanly_or_become_unreachable(
    reason: Departure,
) -> None:
    assert not lose_worker(reason, 10)
