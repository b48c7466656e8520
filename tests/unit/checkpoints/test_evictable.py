"""Which checkpoints of a plan may be evicted, against an oracle that knows nothing of nodes: prefixes of values."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpstage import schedule as s
from hpstage.checkpoints.evictable import kept_states
from hpstage.checkpoints.eviction_policy import KeptState
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import (
    ChainId,
    ChainStarted,
    DriverId,
    SearchEnded,
    SearchStarted,
    Span,
    StateKey,
    StateLost,
    StateReached,
    TrialAdded,
    TrialEnded,
    TrialId,
    TrialProposed,
    WorkerId,
)
from hpstage.plan.nodes import PlannedTrial
from hpstage.plan.plan import SearchPlan
from hpstage.store.memory import MemoryJournal
from tests.invariants import validate_scheduler
from tests.unit.driver.test_several_drivers import Study
from tests.unit.driver.test_several_drivers import searches as wishes
from tests.unit.searches import Search, schedules, searches, trial

Prefix = tuple[tuple[object, ...], ...]


def started(study: str = "study", *, extends: bool = False) -> SearchStarted:
    return SearchStarted(study, "", ("value",), 8, None, "", 0.0, extends)


def proposed(id: str, study: str = "study") -> TrialProposed:
    return TrialProposed(study, 0, TrialId(id), {})


def ended(id: str, study: str = "study") -> TrialEnded:
    return TrialEnded(study, TrialId(id), "PRUNED", (0.5,), 3, 0.0)


class Oracle:
    """Walks every trial step by step."""

    def __init__(self, plan: SearchPlan) -> None:
        self.plan = plan
        self.keys: dict[Prefix, StateKey] = {}  # of states with a checkpoint
        self.costs: dict[Prefix, float] = {}  # of the last step of each prefix
        self.lines = {trial.id: self.line(trial) for trial in plan.trials.values()}
        for planned in plan.trials.values():
            for step in range(1, planned.steps + 1):
                prefix = self.prefix(planned, step)
                node = planned.node_at(step)
                self.costs[prefix] = plan.step_seconds(node)
                state = node.states.get(step)
                if state is not None and state.kept is not None:
                    self.keys[prefix] = state.kept.key
        self.prefixes = {key: prefix for prefix, key in self.keys.items()}

    def line(self, trial: PlannedTrial) -> Prefix:
        names = sorted(trial.schedules)
        return tuple(tuple(trial.schedules[name].value(step) for name in names) for step in range(trial.steps))

    def prefix(self, trial: PlannedTrial, step: int) -> Prefix:
        return self.lines[trial.id][:step]

    def nearest(self, prefix: Prefix) -> StateKey | None:
        """The longest prefix of this one, or itself, that is kept."""
        return next((self.keys[prefix[:n]] for n in range(len(prefix), 0, -1) if prefix[:n] in self.keys), None)

    def needed(self, open_trials: set[str]) -> set[StateKey | None]:
        found: set[StateKey | None] = set()
        below: dict[int, Prefix] = {}  # of each node: the longest prefix known on its line
        for planned in self.plan.trials.values():
            if planned.id in open_trials and planned.requested and planned.answered < planned.steps:
                found.add(self.nearest(self.prefix(planned, planned.requested)))
            for step in range(1, planned.steps + 1):
                node = planned.node_at(step)
                state = node.states.get(step)
                if state is not None and self.plan.open_targets.waiting(state):
                    found.add(self.nearest(self.prefix(planned, step)))
                below[node.id] = max(below.get(node.id, ()), self.prefix(planned, step), key=len)
        for chain in self.plan.chains.values():
            reached = 0 if chain.reached is None else chain.reached.step
            first = chain.spans[0]
            if chain.reached is None:
                found.add(self.keys.get(below[first.node][: first.start]))
            for span in chain.spans:  # steps rise along a chain
                for step in range(max(span.start, reached) + 1, span.stop + 1):
                    found.add(self.keys.get(below[span.node][:step]))
        return found

    def states(self, open_trials: set[str]) -> dict[StateKey, tuple[StateKey | None, float, bool]]:
        needed = self.needed(open_trials)
        states = {}
        for key, prefix in self.prefixes.items():
            parent = self.nearest(prefix[:-1])
            above = 0 if parent is None else len(self.prefixes[parent])
            seconds = sum(self.costs[prefix[:n]] for n in range(above + 1, len(prefix) + 1))
            states[key] = (parent, round(seconds, 6), key in needed)
        return states


def seen(states: list[KeptState]) -> dict[StateKey, tuple[StateKey | None, float, bool]]:
    return {state.key: (state.parent, round(state.seconds, 6), state.needed) for state in states}


@pytest.mark.ci
@given(st.lists(wishes(), min_size=1, max_size=3), st.integers(0, 2**32), st.integers(0, 30), st.data())
def test_kept_states_have_the_parents_seconds_and_needs_found_by_walking_each_trial(wanted, seed, turns, data) -> None:
    choose = random.Random(seed)
    journal, kept = MemoryJournal(), set()
    studies = [Study(f"s{i}", journal, kept, every=choose.choice([2, 3, 10**9])) for i in range(len(wanted))]
    for study, (trials, stops) in zip(studies, wanted, strict=True):
        study.driver.log.write([started(study.name)])
        study.ask(trials, stops)
        study.driver.log.write([proposed(f"{study.name}/{i}", study.name) for i in range(len(trials))])
    for _ in range(turns):
        choose.choice(studies).turn()
    one = studies[0]
    plan = one.plan
    one.driver.log.write([started("another")])  # by which it reads what the others wrote
    open_trials = {trial for record in plan.searches.values() for trial in record.open}
    for id in sorted(open_trials):
        if choose.random() < 0.5:
            one.driver.log.write([ended(id, id.partition("/")[0])])
            open_trials.remove(id)
    for key in data.draw(st.sets(st.sampled_from(sorted(plan.kept)))) if plan.kept else ():
        if not next(state for state in kept_states(plan) if state.key == key).needed:
            ref = plan.kept[key].ref
            one.driver.log.write([StateLost(ref.node, ref.step, "evicted")])
    validate_scheduler(one.scheduler)
    assert seen(kept_states(plan)) == Oracle(plan).states(open_trials)


@given(searches(), st.integers(1, 3))
@settings(max_examples=20)
def test_no_state_is_needed_after_its_search_has_ended(trials: list[TrialAdded], workers: int) -> None:
    search = Search(SimulatedExecutor(workers))
    search.driver.log.write([started(), *(proposed(added.trial) for added in trials)])
    search.run(trials, [added.steps for added in trials])
    assert search.plan.kept
    search.driver.log.write([SearchEnded("study", 0.0)])
    assert not any(state.needed for state in kept_states(search.plan))


def plan_of_two() -> Search:
    """Trials a and b with a common trunk of 4 steps, both trained to step 6 and kept there and at 4."""
    search = Search(SimulatedExecutor(1))
    search.driver.log.write([started(), proposed("study/0"), proposed("study/1")])
    cut = [trial(i, {"a": s.piecewise({0: 1, 4: 2 + i})}, 8) for i in range(2)]
    search.run(cut, [6, 6])
    assert sorted(state.step for state in search.plan.kept.values()) == [4, 6, 6]
    return search


def needed_steps(search: Search) -> list[int]:
    return sorted(search.plan.kept[state.key].step for state in kept_states(search.plan) if state.needed)


def test_the_last_state_of_an_unfinished_trial_is_needed() -> None:
    search = plan_of_two()
    assert needed_steps(search) == [6, 6]
    search.driver.log.write([ended("study/0")])
    assert needed_steps(search) == [6]
    search.driver.log.write([ended("study/1")])
    assert needed_steps(search) == []


def test_the_state_of_a_trial_with_its_final_result_is_needed_only_if_the_result_is_the_best() -> None:
    """Its end is recorded after those of lower numbers: until then, nothing but the best model is worth the room."""
    search = Search(SimulatedExecutor(1))
    search.driver.log.write([SearchStarted("study", "", ("loss",), 8, 5, "", 0.0, directions=("minimize",))])
    search.driver.log.write([proposed(f"study/{i}") for i in range(5)])
    cut = [trial(i, {"a": s.piecewise({0: 1, 4: 2 + i})}, 8) for i in range(5)]
    search.run(cut, [6, 8, 8, 8, 8])
    plan = search.plan
    last = {i: plan.result_of(plan.trials[TrialId(f"study/{i}")]) for i in range(5)}
    for i, value in {0: 0.1, 1: 0.7, 2: 0.3, 3: 0.3, 4: 0.5}.items():
        last[i].metrics = {"loss": value}  # type: ignore[union-attr]

    def needed() -> set[int]:
        keys = {state.key for state in kept_states(plan) if state.needed}
        return {i for i, state in last.items() if state is not None and state.kept and state.kept.key in keys}

    assert needed() == {0, 2, 3}  # the first may be continued; of the others, the best two are equal
    search.driver.log.write([ended("study/0")])
    assert needed() == {2, 3}
    search.driver.log.write([TrialEnded("study", TrialId("study/1"), "COMPLETE", (0.2,), 8, 0.0)])
    assert needed() == {1}


def test_the_state_of_the_best_trial_stays_needed_after_all_trials_have_ended() -> None:
    search = plan_of_two()
    search.driver.log.write([SearchStarted("study", "", ("a",), 8, None, "", 0.0, directions=("minimize",))])
    assert needed_steps(search) == []
    for number, value in ((0, 0.5), (1, 0.2)):
        search.driver.log.write([TrialEnded("study", TrialId(f"study/{number}"), "COMPLETE", (value,), 6, 0.0)])
    [winner] = [state for state in kept_states(search.plan) if state.needed]
    assert search.plan.kept[winner.key] is search.plan.known(TrialId("study/1"), 6)


def test_states_of_unfinished_trials_are_not_needed_after_a_new_search_of_the_study_starts() -> None:
    search = plan_of_two()
    search.driver.log.write([started()])
    assert needed_steps(search) == []


def test_states_of_unfinished_trials_stay_needed_if_a_new_search_takes_them_over() -> None:
    search = plan_of_two()
    search.driver.log.write([ended("study/0"), started(extends=True)])
    assert needed_steps(search) == [6]


def test_the_start_state_of_a_chain_is_needed_until_its_first_report() -> None:
    search = plan_of_two()
    search.driver.log.write([ended("study/0"), ended("study/1")])
    node = search.plan.trials[TrialId("study/0")].node_at(6)
    begun = ChainStarted(ChainId("other-1"), DriverId("other"), WorkerId("w"), (Span(node.id, 6, 8),), 0.0)
    search.driver.log.write([begun])
    assert needed_steps(search) == [6]
    search.driver.log.write([StateReached(ChainId("other-1"), WorkerId("w"), node.id, 6, 7, 0.0, 1.0)])
    assert needed_steps(search) == []


def test_a_state_that_a_running_chain_will_reach_is_needed() -> None:
    search = plan_of_two()
    search.driver.log.write([ended("study/0"), ended("study/1")])
    node = search.plan.trials[TrialId("study/0")].last.ancestry()[0]
    begun = ChainStarted(ChainId("other-1"), DriverId("other"), WorkerId("w"), (Span(node.id, 0, 4),), 0.0)
    search.driver.log.write([begun])
    assert needed_steps(search) == [4]


def test_loading_a_state_updates_the_time_of_its_last_use() -> None:
    search = plan_of_two()
    before = {state.key: state.last_used for state in kept_states(search.plan)}
    search.driver.ask(TrialId("study/0"), 8)
    search.answers(1)
    used = {state.key for state in kept_states(search.plan) if state.last_used > before.get(state.key, 1e9)}
    source = search.plan.trials[TrialId("study/0")].node_at(6).states[6].kept
    assert source is not None
    latest = max(before.values())
    # The one that was kept last: it was used when it was kept, and is trained on at that very moment.
    assert used == {source.key} or before[source.key] == latest


@given(schedules(8))
def test_a_trial_without_requests_has_no_kept_states(schedule: s.Schedule) -> None:
    search = Search(SimulatedExecutor(1))
    search.driver.log.write([started(), proposed("study/0")])
    search.driver.add([trial(0, {"a": schedule}, 8)])
    assert kept_states(search.plan) == []
