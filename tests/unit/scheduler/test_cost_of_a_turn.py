"""What a turn of the driver costs grows neither with the trials of the plan nor with the workers.

Counted in calls of functions, which no other load on the machine changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hpstage import schedule as s
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import TrialAdded
from tests.invariants import validate_scheduler
from tests.simulated_audits import AuditingExecutor
from tests.unit.calls import calls_of, instructions_of
from tests.unit.searches import Search, trial


def calls_per_report(
    workers: int, trials: list[TrialAdded], requested: Sequence[int] = (24,), **options: object
) -> float:
    """Return the calls per trained stage while all workers are busy and more trials wait."""
    executor = AuditingExecutor(workers, step_seconds=lambda hp: 1.0 + float(hp["b"] or 0) / 1e4, audit_seconds=0.0)
    search = Search(executor, **options)
    search.driver.add(trials)
    for one in trials:
        for step in requested:
            search.driver.ask(one.trial, step)
    while search.scheduler.running < workers:
        search.driver.wait()
    reached = len(executor.trained)

    def some() -> None:
        while len(executor.trained) < reached + 200:
            search.driver.wait()

    calls = calls_of(some)
    validate_scheduler(search.scheduler)
    return calls / (len(executor.trained) - reached)


def tree(trials: int) -> list[TrialAdded]:
    """Trials of which each four part at every fourth step."""
    return [
        trial(i, {"a": s.piecewise({4 * level: i // 4**level % 4 for level in range(6)}), "b": s.constant(i % 4)}, 24)
        for i in range(trials)
    ]


def branches(trials: int) -> list[TrialAdded]:
    """Trials that have nothing in common."""
    return [trial(i, {"a": s.constant(1), "b": s.constant(i)}, 24) for i in range(trials)]


@pytest.mark.ci
def test_a_driver_turn_costs_about_the_same_however_many_trials_wait() -> None:
    assert calls_per_report(8, tree(4096)) < 1.5 * calls_per_report(8, tree(1024))


def test_a_driver_turn_makes_a_limited_number_of_function_calls() -> None:
    assert calls_per_report(8, tree(1024)) < 775


@pytest.mark.ci
def test_a_driver_turn_costs_about_the_same_however_many_workers_train() -> None:
    assert calls_per_report(400, tree(4096)) < 1.5 * calls_per_report(8, tree(4096))


@pytest.mark.ci
def test_a_driver_turn_costs_about_the_same_however_many_workers_train_while_few_trials_wait() -> None:
    """When workers outnumber what waits, chains are cut so that all end together, for which all are compared."""
    requested = range(4, 25, 4)
    assert calls_per_report(400, branches(500), requested) < 2.0 * calls_per_report(40, branches(50), requested)


@pytest.mark.ci
def test_a_driver_turn_with_audits_costs_about_the_same_however_many_trials_wait() -> None:
    with_audits = calls_per_report(8, tree(1024), audit=True)
    assert with_audits < 1.5 * calls_per_report(8, tree(256), audit=True)
    assert with_audits < 1.2 * calls_per_report(8, tree(1024))


@pytest.mark.ci
def test_starting_a_chain_costs_about_the_same_however_many_chains_start_at_once() -> None:
    def instructions(workers: int) -> float:
        search = Search(SimulatedExecutor(workers), verify="first-fork")
        trials = [trial(number, {"optimizer": s.constant(f"sgd-{number}")}, 24) for number in range(workers)]
        search.driver.add(trials)
        for one in trials:
            search.driver.ask(one.trial, 24)
        found = instructions_of(lambda: search.driver.wait(0.0)) / workers  # they join, and each is given a chain
        assert search.scheduler.running == workers
        return found

    assert instructions(400) < 1.05 * instructions(100)
