"""Chains that are ended early: at their next step, with their states kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints import FolderCheckpoints
from hpstage.driver.driver import Driver
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.log import open_plan
from hpstage.scheduler.scheduler import Scheduler
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape
from tests.invariants import validate_scheduler
from tests.unit.searches import WORKLOAD, Search, trial


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("seconds", [0.05, 1.0, 50.0])
def test_a_stopped_chain_ends_after_its_running_step_however_long_a_step_takes(seconds: float, measured: bool) -> None:
    executor = SimulatedExecutor(1, step_seconds=seconds)
    search = Search(executor)
    if measured:
        search.run([trial(0, {"a": s.constant(2)}, 1)], [1])
    before, began = search.plan.totals.steps_trained, executor.clock()
    search.driver.add([trial(1, {"a": s.constant(1)}, 1000)])
    search.driver.ask("study/1", 1000)
    moment = 7.3 * seconds
    executor.cluster.join(moment)  # an event that the driver receives
    while len(search.scheduler.workers) < 2:
        search.driver.wait()
    assert executor.clock() == pytest.approx(began + moment)
    search.driver.finish()
    validate_scheduler(search.scheduler)
    assert search.plan.totals.steps_trained - before == 8, "the running step was its last"
    assert search.driver.accounting.whole().steps_wasted == 0
    search.run([], [])
    search.answers(1)
    assert search.plan.totals.steps_trained - before == 1000
    assert search.driver.accounting.whole().steps_wasted == 0


def test_waking_the_inline_executor_interrupts_training_after_the_running_step(tmp_path: Path) -> None:
    executor = hpstage.InlineExecutor()

    class Waking(Tape):
        trained: list[int] = []  # noqa: RUF012  # shared by the copies that are trained

        def train(self, step: int, hp: Any) -> None:
            super().train(step, hp)
            self.trained.append(step)
            if len(self.trained) == 10:
                executor.wake()

    executor.open(Waking(), FolderCheckpoints(tmp_path, WORKLOAD))
    journal = MemoryJournal()
    plan = open_plan(journal, WORKLOAD, {})
    driver = Driver(plan, Scheduler(plan, checkpoint_every=10**6), executor, journal)
    driver.add([trial(0, {"a": s.constant(1)}, 10**6)])
    driver.ask("study/0", 10**6)
    while not Waking.trained:
        assert driver.wait(0.1) == []
    assert len(Waking.trained) == 10, "it looked up at once"
    driver.finish()
    assert len(Waking.trained) == 10
    assert plan.totals.steps_trained == len(Waking.trained), "all of it was reported"
    assert driver.accounting.whole().steps_wasted == 0
    [state] = plan.kept.values()
    assert state.step == len(Waking.trained)
    executor.close()
