"""Hyperparameters that come later: a trial without one is a trial with its default, and shares its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstage import schedule as s
from hpstage.errors import UsageError
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.checks import check
from hpstage.plan.facts import SearchStarted, StateKey, TrialAdded, TrialId
from hpstage.plan.plan import SearchPlan
from hpstage.plan.snapshot import restored, snapshot_of
from tests.invariants import validate
from tests.unit.searches import WORKLOAD, Search, histories, schedules, trial

STEPS = 8
DEFAULTS = {"b": 1, "c": "none"}


def started(defaults: Mapping[str, s.Scalar]) -> SearchStarted:
    return SearchStarted("study", "ASHA()", ("loss",), STEPS, None, "TPE", 0.0, defaults=dict(defaults))


@st.composite
def trials_without(draw: st.DrawFn, names: Sequence[str] = ("b", "c")) -> list[TrialAdded]:
    """Trials of which some lack what has a default."""
    found = []
    for number in range(draw(st.integers(1, 6))):
        own = {"a": draw(schedules(STEPS))}
        if "b" in names and draw(st.booleans()):
            own["b"] = draw(schedules(STEPS))
        if "c" in names and draw(st.booleans()):
            own["c"] = s.piecewise({0: "none", draw(st.integers(1, STEPS - 1)): draw(st.sampled_from(["none", "x"]))})
        found.append(trial(number, own, STEPS))
    return found


def renamed(trials: Sequence[TrialAdded], by: int) -> list[TrialAdded]:
    return [trial(by + number, added.schedules, STEPS) for number, added in enumerate(trials)]


def filled(trials: Sequence[TrialAdded]) -> list[TrialAdded]:
    defaults = {name: s.constant(value) for name, value in DEFAULTS.items()}
    return [trial(number, defaults | added.schedules, STEPS) for number, added in enumerate(trials)]


def keys(plan: SearchPlan, id: TrialId) -> list[StateKey]:
    path = plan.trials[id].path_to(STEPS)
    return [plan.key(node, step) for node, start, stop in path for step in range(start + 1, stop + 1)]


@pytest.mark.ci
@given(trials_without(()), trials_without())
def test_trials_trained_before_a_default_was_declared_are_reused_by_trials_with_the_default(before, after):
    search = Search(SimulatedExecutor(2), checkpoint_every=1)
    search.run(before, [STEPS] * len(before))
    old = {added.trial: keys(search.plan, added.trial) for added in before}
    search.driver.log.write([started(DEFAULTS)])
    after = renamed(after, 100)
    search.run(after, [STEPS] * len(after))
    validate(search.plan)
    requested = filled([*before, *after])
    assert search.plan.totals.steps_trained == len(histories(requested, [STEPS] * len(requested)))
    assert old == {id: keys(search.plan, id) for id in old}, "states on disk are found by their keys"
    for added in after:
        line = filled([added])[0].schedules
        assert search.plan.trials[added.trial].schedules == {name: line[name].until(STEPS) for name in line}


@pytest.mark.ci
@given(trials_without(), trials_without())
def test_trials_with_an_explicitly_given_default_value_are_reused_by_trials_without_it(before, after):
    """Two may have been trained twice before that was stated; not a third time."""
    search = Search(SimulatedExecutor(2), checkpoint_every=1)
    search.run(before, [STEPS] * len(before))
    old = {added.trial: keys(search.plan, added.trial) for added in before}
    trained = search.plan.totals.steps_trained
    search.driver.log.write([started(DEFAULTS)])
    assert old == {id: keys(search.plan, id) for id in old}
    new = renamed(after, 100)
    search.run(new, [STEPS] * len(new))
    everything, known = filled([*before, *after]), filled(before)
    more = histories(everything, [STEPS] * len(everything)) - histories(known, [STEPS] * len(known))
    assert search.plan.totals.steps_trained == trained + len(more)
    kept = [state.kept.key for node in search.plan.nodes for state in node.states.values() if state.kept is not None]
    assert len(set(kept)) == len(kept)


@given(trials_without(), trials_without(), st.booleans())
def test_a_plan_with_defaults_restored_from_a_snapshot_has_the_keys_of_the_original_plan(before, after, sharing):
    plan = SearchPlan(WORKLOAD, sharing=sharing)
    for fact in [*before, started({"b": 1}), *renamed(after, 100), started(DEFAULTS)]:
        check(plan, fact)
        plan.apply(fact)
    again = restored(snapshot_of(plan), WORKLOAD, sharing=sharing)
    for number, one in enumerate((plan, again)):
        for added in renamed(before + after, 200):
            one.apply(added)
        assert number == 0 or len(one.nodes) == len(plan.nodes)
        assert [keys(one, id) for id in one.trials] == [keys(plan, id) for id in plan.trials]


def test_a_trial_may_be_added_again_with_or_without_a_hyperparameter_that_has_a_default() -> None:
    plan = SearchPlan(WORKLOAD)
    plan.apply(started({"b": 1}))
    plan.apply(trial(0, {"a": s.constant(2)}, 4))
    with_it = trial(0, {"a": s.constant(2), "b": s.piecewise({0: 1, 6: 3})}, 8)
    check(plan, with_it)
    plan.apply(with_it)
    without = trial(0, {"a": s.constant(2)}, 4)
    check(plan, without)
    assert plan.trials[without.trial].steps == 8


def test_two_stores_with_different_defaults_have_equal_keys_only_for_trials_added_before_them() -> None:
    """What they take for the default may differ: only what was trained without has the same keys on both."""
    plans = [SearchPlan(WORKLOAD) for _ in range(2)]
    without, later = trial(0, {"a": s.constant(1)}, STEPS), trial(1, {"a": s.constant(2)}, STEPS)
    for plan, default in zip(plans, (1, 2), strict=True):
        for fact in (without, started({"b": default}), later):
            plan.apply(fact)
    assert keys(plans[0], without.trial) == keys(plans[1], without.trial)
    assert not {*keys(plans[0], later.trial)} & {*keys(plans[1], later.trial)}


def test_a_changed_default_is_refused_with_a_remedy() -> None:
    plan = SearchPlan(WORKLOAD)
    plan.apply(started({"b": 1}))
    check(plan, started({"b": 1.0}))
    with pytest.raises(UsageError, match=r"'b' the value 2, .* trained with 1: keep that default .* another `version`"):
        check(plan, started({"b": 2}))
    with pytest.raises(UsageError, match="'b' the value True"):
        check(plan, started({"b": True}))
