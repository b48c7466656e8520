"""A stage that kills its workers fails after a bound, across drivers, and takes down only what lies below it."""

from __future__ import annotations

import pytest

from hpstage import schedule as s
from hpstage.driver.driver import Driver
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.executor import Executor
from hpstage.plan.facts import DriverId, StateKey, TrialAdded, TrialId, WorkerId
from hpstage.plan.log import open_plan
from hpstage.scheduler.answers import Answer
from hpstage.scheduler.scheduler import Scheduler
from hpstage.store.memory import MemoryJournal
from tests.invariants import validate_scheduler
from tests.unit.searches import WORKLOAD

SOUND = {"a": s.constant(1)}
POISONED = {"a": s.constant(13)}
POISONED_LATER = {"a": s.piecewise({0: 13, 6: 2})}


class Deadly(SimulatedExecutor):
    """Kills the worker that begins a chain on the poisoned stage; another one comes in its place."""

    deaths = 0

    def start(self, worker: WorkerId, chain):
        super().start(worker, chain)
        if chain.stages[0].forms["a"].value(0) == 13:
            type(self).deaths += 1
            self.cluster.kill(worker, 0.5)
            self.cluster.join(0.6)


def driver_on(journal: MemoryJournal, executor: Executor, name: str) -> Driver:
    plan = open_plan(journal, WORKLOAD, {})
    return Driver(plan, Scheduler(plan, driver=DriverId(name), checkpoint_every=10**9), executor, journal)


def ask(driver: Driver) -> list[Answer]:
    trials = [SOUND, POISONED, POISONED_LATER]
    driver.add([TrialAdded(TrialId(str(i)), schedules, 8) for i, schedules in enumerate(trials)])
    for i in range(len(trials)):
        driver.ask(TrialId(str(i)), 8)
    answers: list[Answer] = []
    for _ in range(200):
        answers += driver.wait()
        validate_scheduler(driver.scheduler)
        if len(answers) == len(trials):
            break
    return answers


def test_a_stage_that_kills_its_workers_fails_with_the_history_of_its_attempts() -> None:
    Deadly.deaths = 0
    answers = {answer.trial: answer for answer in ask(driver_on(MemoryJournal(), Deadly(2), "d"))}
    assert Deadly.deaths == 3
    assert answers["0"].metrics is not None
    for trial in ("1", "2"):
        failure = answers[trial].failure
        assert failure is not None
        assert failure.summary == "3 workers died in a row while training from step 0 (a=13)"
        assert failure.traceback.count(" died, ") == 3


@pytest.mark.parametrize("before", [1, 2])
def test_attempts_of_earlier_drivers_count_for_a_stage_that_kills_its_workers(before: int) -> None:
    journal = MemoryJournal()
    Deadly.deaths = 0
    kept: set[StateKey] = set()
    first = driver_on(journal, Deadly(1, kept=kept), "first")
    first.add([TrialAdded(TrialId("1"), POISONED, 8)])
    first.ask(TrialId("1"), 8)
    while Deadly.deaths < before:
        first.wait()
    first.wait()  # the loss is written
    first.leave()
    Deadly.deaths = 0
    answers = {answer.trial: answer for answer in ask(driver_on(journal, Deadly(1, kept=kept), "second"))}
    assert Deadly.deaths == 3 - before
    assert answers["1"].failure is not None
    # Requested again after it was given up, as by the user's next call, it has all its attempts again.
    Deadly.deaths = 0
    ask(driver_on(journal, Deadly(1, kept=kept), "third"))
    assert Deadly.deaths == 3
