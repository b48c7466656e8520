"""Trials as runs: their figures."""

from __future__ import annotations

from hpstage.accounting.studies import run_rows
from hpstage.plan.facts import Part, StateKey, TargetAsked, TrialId
from tests.unit.checkpoints.test_eviction import kept_line


def test_bytes_that_checkpoints_of_a_trial_share_count_once() -> None:
    plan = kept_line(4, parts=(Part(StateKey("part-0"), 10),)).plan
    plan.apply(TargetAsked(TrialId("study/0"), 4))
    assert [row.bytes for row in run_rows(plan)] == [plan.kept_bytes] == [4 + 10]
