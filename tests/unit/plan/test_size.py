"""What a plan takes for a trial, counted: bytes of its own objects, and calls of functions for each trial inserted."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from hpstage import schedule as s
from hpstage.plan.facts import Fact, TargetAsked, TrialAdded, TrialId
from hpstage.plan.plan import SearchPlan
from hpstage.plan.snapshot import restored, snapshot_of
from tests.unit.calls import calls_of
from tests.unit.searches import WORKLOAD

SEGMENTS, STEPS = 5, 50
BRANCHES = 4


def trial(number: int, *, apart: bool) -> TrialAdded:
    """A trial of 5 segments of 3 hyperparameters, in each of which all three have other values."""
    picks = [number] * SEGMENTS if apart else [number // BRANCHES ** (SEGMENTS - 1 - i) % BRANCHES for i in range(5)]
    starts = range(0, STEPS, STEPS // SEGMENTS)
    return TrialAdded(
        TrialId(f"study/{number}"),
        {
            "lr": s.piecewise({at: 0.1 / (1 + pick) + 1e-9 * at for at, pick in zip(starts, picks, strict=True)}),
            "momentum": s.piecewise({at: 0.5 + 1e-6 * pick + at for at, pick in zip(starts, picks, strict=True)}),
            "batch": s.piecewise({at: 300 + 8 * pick + at for at, pick in zip(starts, picks, strict=True)}),
        },
        STEPS,
    )


def insert(plan: SearchPlan, first: int, count: int, *, apart: bool) -> None:
    """Fold trials that wait for their last steps; the facts are not kept."""
    for number in range(first, first + count):
        added = trial(number, apart=apart)
        facts: list[Fact] = [added, TargetAsked(TrialId(str(added.trial)), STEPS)]
        for fact in facts:
            plan.apply(fact)


@pytest.mark.parametrize(("apart", "most"), [(False, 1350), (True, 2600)])
@pytest.mark.ci
def test_an_unfinished_trial_takes_few_bytes_in_the_plan(apart: bool, most: int) -> None:
    """Of trials that diverge from one another at every step, each has five nodes of its own."""
    plan = SearchPlan(WORKLOAD)
    count = BRANCHES**SEGMENTS
    gc.collect()
    tracemalloc.start()
    try:
        insert(plan, 0, count, apart=apart)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(plan.trials) == count
    assert len(plan.nodes) == (5 * count if apart else sum(BRANCHES**level for level in range(1, SEGMENTS + 1)))
    assert taken / count < most


@pytest.mark.parametrize("apart", [False, True])
def test_the_cost_of_inserting_a_trial_does_not_grow_with_the_number_of_trials(apart: bool) -> None:
    plan = SearchPlan(WORKLOAD)
    insert(plan, 0, 100, apart=apart)

    def cost(first: int) -> float:
        facts: list[Fact] = [trial(number, apart=apart) for number in range(first, first + 100)]
        facts += [TargetAsked(TrialId(f"study/{number}"), STEPS) for number in range(first, first + 100)]
        return calls_of(lambda: [plan.apply(fact) for fact in facts]) / 100

    few = cost(100)
    insert(plan, 200, 2000, apart=apart)
    many = cost(2200)
    assert many < 1.25 * few
    assert many < 210 if apart else many < 125


@pytest.mark.ci
def test_restoring_a_plan_takes_little_memory_besides_the_plan_itself() -> None:
    plan = SearchPlan(WORKLOAD)
    insert(plan, 0, BRANCHES**SEGMENTS, apart=False)
    content = snapshot_of(plan)
    restored(content, WORKLOAD, sharing=True)  # what is made once
    gc.collect()
    tracemalloc.start()
    try:
        again = restored(content, WORKLOAD, sharing=True)
        gc.collect()
        taken, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(again.trials) == len(plan.trials)
    assert most < 1.3 * taken
