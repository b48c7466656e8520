"""The states of a study that are worth keeping: the best so far, and the last ones of the best completed trials."""

from __future__ import annotations

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstage.plan.facts import NodeId, SearchStarted, TrialEnded, TrialId
from hpstage.plan.nodes import Node, PlannedTrial, State
from hpstage.plan.winners import Winners, best_first, best_state

NODE = Node(NodeId(0), None, 0, (), (), None, PlannedTrial(TrialId("study/0"), 1))
Direction = Literal["minimize", "maximize"]


def search(*directions: Direction, study: str = "study", extends: bool = False) -> SearchStarted:
    metric = tuple(f"m{i}" for i in range(len(directions)))
    return SearchStarted(study, "", metric, 8, None, "", 0.0, extends, directions=directions)


def evaluated(step: int, **metrics: float) -> State:
    state = State(NODE, step)
    state.metrics = metrics
    return state


def ended(values: tuple[float, ...], state: str = "COMPLETE", study: str = "study") -> TrialEnded:
    return TrialEnded(study, TrialId("study/0"), state, values, 3, 0.0)  # type: ignore[arg-type]


@given(st.lists(st.floats(allow_nan=True, width=16), max_size=20), st.sampled_from(["minimize", "maximize"]))
def test_the_winner_is_the_first_state_with_the_best_value(values: list[float], direction: Direction) -> None:
    winners = Winners()
    winners.begin(search(direction))
    for step, value in enumerate(values, 1):
        winners.answer("study", evaluated(step, m0=value))
    numbers = [value for value in values if value == value]
    best = (max if direction == "maximize" else min)(numbers, default=None)
    assert [state.step for state in winners] == ([] if best is None else [values.index(best) + 1])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=20))
def test_winners_of_two_objectives_are_all_trials_that_no_other_trial_dominates(values: list[tuple[int, int]]) -> None:
    winners = Winners()
    winners.begin(search("minimize", "maximize"))
    for step, (low, high) in enumerate(values, 1):
        winners.end(ended((float(low), float(high))), State(NODE, step))
    front = {
        (low, high)
        for low, high in values
        if not any(a <= low and b >= high and (a, b) != (low, high) for a, b in values)
    }
    assert sorted(state.step for state in winners) == [step for step, pair in enumerate(values, 1) if pair in front]


def test_winners_are_the_first_and_the_lowest_numbered_of_equal_trials_and_never_infeasible() -> None:
    winners = Winners()
    winners.begin(search("maximize"))
    for number in (7, 9, 3, 5):
        winners.end(TrialEnded("study", TrialId(f"study/{number}"), "COMPLETE", (1.0,), 3, 0.0), State(NODE, number))
    assert [state.step for state in winners] == [7, 3]
    winners.end(TrialEnded("study", TrialId("study/8"), "COMPLETE", (2.0,), 3, 0.0, feasible=False), State(NODE, 8))
    assert [state.step for state in winners] == [7, 3]
    winners.end(TrialEnded("study", TrialId("study/8"), "COMPLETE", (2.0,), 3, 0.0), State(NODE, 8))
    assert [state.step for state in winners] == [8]


def test_pruned_and_failed_trials_and_unknown_metrics_are_never_winners() -> None:
    winners = Winners()
    winners.answer("unknown", evaluated(1, m0=0.0))
    winners.end(ended((0.0,), study="unknown"), State(NODE, 1))
    winners.begin(search("minimize"))
    winners.end(ended((0.0,), "PRUNED"), State(NODE, 1))
    winners.end(ended((0.0,), "FAIL"), State(NODE, 2))
    winners.end(ended((0.0,)), None)
    winners.answer("study", evaluated(3, other=0.0))
    assert not list(winners)


def test_a_later_search_of_a_study_keeps_the_winners_unless_its_direction_changes() -> None:
    winners = Winners()
    winners.begin(search("minimize"))
    winners.answer("study", evaluated(1, m0=1.0))
    winners.begin(search("minimize", extends=True))
    winners.answer("study", evaluated(2, m0=2.0))
    assert [state.step for state in winners] == [1]
    winners.begin(search("maximize"))
    assert not list(winners)
    winners.begin(search("maximize", study="other"))
    winners.answer("study", evaluated(3, m0=3.0))
    winners.answer("other", evaluated(4, m0=4.0))
    assert [state.step for state in winners] == [3, 4]


@pytest.mark.parametrize(("direction", "order"), [("minimize", [9, 10, 2]), ("maximize", [2, 9, 10])])
def test_trials_are_ordered_best_first_and_by_number_if_their_values_are_equal(
    direction: Direction, order: list[int]
) -> None:
    values = {TrialId("study/10"): (1.0,), TrialId("study/2"): (3.0,), TrialId("study/9"): (1.0,)}
    assert best_first(values, search(direction)) == [f"study/{number}" for number in order]


@pytest.mark.parametrize(("direction", "best"), [("minimize", (-math.inf, 3)), ("maximize", (2.0, 1))])
def test_the_best_state_of_a_trial_is_the_first_of_equal_states_among_requested_steps(
    direction: Direction, best: tuple[float, int]
) -> None:
    node = Node(NodeId(0), None, 0, (), (), None, PlannedTrial(TrialId("study/0"), 8))
    trial = node.maker
    trial.last, trial.requested = node, 6
    assert best_state(trial, search(direction)) is None
    for step, value in enumerate([2.0, math.nan, -math.inf, 2.0, -math.inf, 1.0, 7.0], 1):
        node.ensure_state(step).metrics = {"m0": value}
    node.ensure_state(1).metrics = {"m0": 2.0, "m1": 9.0}
    assert best_state(trial, search(direction)) == best
