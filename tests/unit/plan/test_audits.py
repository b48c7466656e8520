"""Figures of audits: each step counts once, and all that was begun is counted."""

from __future__ import annotations

from typing import Any

import pytest

from hpstage import schedule as s
from hpstage.accounting.audits import AuditFigures, audits_of
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import Audited, NodeId, StateDiffers, TrialId, WorkerId
from hpstage.plan.plan import SearchPlan
from tests.unit.searches import Search, trial

WORKER = WorkerId("w")


@pytest.fixture
def plan() -> SearchPlan:
    """Two trials of 16 steps that part after 8: 24 steps."""
    search = Search(SimulatedExecutor(1), checkpoint_every=4)
    search.run([trial(i, {"a": s.piecewise({0: 1, 8: i + 2})}, 16) for i in range(2)], [16, 16])
    assert search.plan.totals.steps_trained == 24
    return search.plan


def fact(plan: SearchPlan, start: int, step: int, outcome: Any = "equal", of: Any = "segment") -> Audited:
    node = plan.trials[TrialId("study/1")].node_at(step)
    return Audited(of, WORKER, node.id, start, step, 7.0, 1.5, outcome, int(outcome in ("equal", "differs")))


def test_a_step_audited_twice_counts_once(plan: SearchPlan) -> None:
    figures = AuditFigures()
    for start, step in ((8, 12), (4, 8), (0, 12), (12, 16), (8, 12)):
        figures.add(fact(plan, start, step), plan)
    assert figures.steps == 16
    assert figures.share(plan) == pytest.approx(16 / 24)
    assert figures.line(plan) == "67 % of the steps in 7.5 s, 0 differences: 5 segments"


def test_stopped_and_failed_audits_count_seconds_but_no_steps(plan: SearchPlan) -> None:
    figures = AuditFigures()
    assert not figures and figures.line(plan) == ""
    figures.add(fact(plan, 0, 4, "stopped"), plan)
    figures.add(fact(plan, 0, 4, "failed"), plan)
    assert (figures.steps, figures.seconds) == (0, 3.0)
    line = "0 % of the steps in 3.0 s, 0 differences: 1 gave way to training, 1 failed"
    assert figures.line(plan) == line


def test_the_audit_summary_names_whole_trials_the_winner_and_differences(plan: SearchPlan) -> None:
    trials = [fact(plan, 0, 16, of="trial"), fact(plan, 0, 16, of="winner"), fact(plan, 4, 8, "differs")]
    differs = StateDiffers(NodeId(0), 8, WORKER, 7.0, "a leaf", ("one", "another"))
    other = StateDiffers(NodeId(0), 8, WorkerId("v"), 8.0, None, ("one", "another"))
    report = audits_of(plan, [other, *trials, differs])
    assert report.figures.outcomes() == {"equal": 2, "differs": 1, "stopped": 0, "failed": 0}
    assert report.differences == (differs,)
    line = "audited 67 % of the steps in 4.5 s, 1 difference: 1 segment, 1 whole trial, 1 winner"
    assert str(report) == line


def test_the_audit_summary_of_a_plan_without_audits_names_the_audit_command(plan: SearchPlan) -> None:
    assert str(audits_of(plan, [])) == "nothing was audited; `hpstage audit` does it at any time"
