"""A driver that others took for dead: what it knows of its workers then, and reports that come too late."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpstage import schedule as s
from hpstage.errors import LeaseLost, UsageError
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import ChainId, DriverId, DriverJoined, DriverLeft, TrialAdded, TrialId, WorkerId
from hpstage.plan.log import encode, open_plan
from hpstage.plan.messages import ChainEnded, Report
from tests.unit.searches import WORKLOAD, Search

ME = DriverId("me")
TRIAL = TrialAdded(TrialId("t"), {"a": s.constant(1)}, 8)


class Stopped(SimulatedExecutor):
    """Lets something happen when it has reports, before the driver gets them."""

    happens: Callable[[list[Report]], None] | None = None

    def wait(self, timeout=None):
        reports = super().wait(timeout)
        if reports and self.happens is not None:
            happens, self.happens = self.happens, None
            happens(reports)
        return reports


def begun() -> Search:
    """One worker trains eight steps."""
    search = Search(Stopped(1), driver=ME)
    search.driver.log.write([DriverJoined(ME, "", "a host", 0, 0.0)])
    search.driver.add([TRIAL])
    search.driver.ask(TRIAL.trial, 8)
    search.driver.wait(0.0)
    search.driver.wait(0.0)
    assert search.scheduler.running == 1
    return search


@pytest.mark.parametrize(
    ("happen", "left"),
    [
        (lambda executor: None, ["sim-0"]),  # the chain ends
        (lambda executor: executor.cluster.kill(WorkerId("sim-0"), 3.0), []),
        (lambda executor: executor.cluster.join(8.0), ["sim-0", "sim-1"]),
    ],
    ids=["ended", "died", "joined"],
)
def test_a_driver_declared_dead_keeps_the_workers_that_its_last_reports_left_alive(happen, left) -> None:
    search = begun()
    happen(search.executor)
    search.executor.happens = lambda reports: search.journal.append([encode(DriverLeft(ME, 0.0, "gone"))])
    with pytest.raises(LeaseLost):
        search.answers(1)
    assert sorted(search.driver.abandon()) == left


def test_a_late_report_of_an_ended_chain_does_not_exclude_its_worker_from_new_chains(
    caplog: pytest.LogCaptureFixture,
) -> None:
    search = begun()
    late = ChainEnded(ChainId("an earlier one"), WorkerId("sim-0"), "cut_off", 1.0, message="no such mount")
    search.executor.happens = lambda reports: reports.insert(0, late)
    while not search.driver.wait():
        assert search.scheduler.back_at() is None
    assert not caplog.records


def test_a_trial_with_requested_steps_cannot_be_added_again_with_other_schedules() -> None:
    search = Search(SimulatedExecutor(1))
    search.driver.add([TRIAL])
    search.driver.ask(TRIAL.trial, 8)
    with pytest.raises(UsageError, match="was trained to step 8"):
        search.driver.add([TrialAdded(TRIAL.trial, {"a": s.constant(2)}, 4)])
    assert len(search.answers(1)) == 1
    assert open_plan(search.journal, WORKLOAD, {}).trials[TRIAL.trial].requested == 8


@pytest.mark.ci
def test_a_stage_tree_may_be_600_nodes_deep() -> None:
    search = Search(SimulatedExecutor(1))
    # Each branches from the one before it at its last step.
    trials = [
        TrialAdded(TrialId(str(n)), {"a": s.piecewise({step: step for step in range(n + 1)})}, n + 2)
        for n in range(600)
    ]
    search.driver.add(trials)
    search.driver.ask(trials[-1].trial, trials[-1].steps)
    assert len(search.answers(1, validate=False)) == 1
    assert len(search.plan.nodes) == 600 and search.plan.totals.steps_trained == 601
