"""The planner's laws, on simulated workers: each step once, the right states, whatever arrives in which order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpstage import schedule as s
from hpstage.accounting.savings import merged
from hpstage.errors import InternalError
from hpstage.execution.simulated import SimulatedExecutor, value_of_key
from hpstage.plan.checks import check
from hpstage.plan.facts import (
    ChainId,
    DriverId,
    DriverJoined,
    DriverLeft,
    Kept,
    StateKey,
    StateReached,
    TargetAsked,
    TrialId,
    WorkerId,
)
from hpstage.plan.log import open_plan
from tests.invariants import is_idle, validate, validate_scheduler
from tests.unit.searches import WORKLOAD, Search, histories, searches, trial


@given(searches(), st.data(), st.integers(1, 3))
def test_every_unique_prefix_is_trained_exactly_once(trials, data, workers):
    stops = [data.draw(st.integers(1, t.steps)) for t in trials]
    search = Search(SimulatedExecutor(workers))
    answers = search.run(trials, stops)
    unique = len(histories(trials, stops))
    assert merged(search.plan).steps_unique == unique
    assert search.plan.totals.steps_trained == unique
    assert merged(search.plan).steps_asked == sum(stops)
    by_trial = {answer.trial: answer for answer in answers}
    for added, stop in zip(trials, stops, strict=True):
        planned = search.plan.trials[added.trial]
        key = search.plan.key(planned.node_at(stop), stop)
        assert by_trial[added.trial].metrics == value_of_key(key, stop)


@pytest.mark.ci
@given(searches(), searches(), st.data())
def test_state_keys_are_equal_exactly_if_the_training_histories_are_equal(first, second, data):
    """Over two plans built in different orders: keys are equal exactly where the values seen are equal."""
    seen: dict[StateKey, tuple] = {}
    for trials in (
        first + [trial(100 + i, dict(t.schedules), t.steps) for i, t in enumerate(second)],
        second + first,
    ):
        search = Search(SimulatedExecutor(1))
        search.driver.add([trial(i, dict(t.schedules), t.steps) for i, t in enumerate(trials)])
        for planned in search.plan.trials.values():
            for step in range(1, planned.steps + 1):
                history = tuple(
                    (name, tuple(planned.schedules[name].value(at) for at in range(step)))
                    for name in sorted(planned.schedules)
                )
                key = search.plan.key(planned.node_at(step), step)
                assert seen.setdefault(key, history) == history
    assert len(set(seen.values())) == len(seen)


@given(searches(most=6), st.data())
def test_trials_that_arrive_during_a_search_train_at_most_the_requested_steps(trials, data):
    search = Search(SimulatedExecutor(2))
    answers = []
    requests = 0
    stops = []
    for added in trials:
        stop = data.draw(st.integers(1, added.steps))
        stops.append(stop)
        search.driver.add([added])
        search.driver.ask(added.trial, stop)
        requests += 1
        for _ in range(data.draw(st.integers(0, 2))):
            if len(answers) < requests:
                answers += search.driver.wait()
                validate_scheduler(search.scheduler)
    answers += search.answers(requests - len(answers))
    trained = search.plan.totals.steps_trained
    assert trained >= merged(search.plan).steps_unique == len(histories(trials, stops))
    # Steps trained again lie before a boundary that was passed before anybody requested it.
    assert trained <= merged(search.plan).steps_asked


@pytest.mark.ci
@given(searches(), st.data(), st.integers(1, 3))
def test_killed_workers_fail_no_trial_and_no_reported_step_is_trained_twice(trials, data, workers):
    executor = SimulatedExecutor(workers)
    search = Search(executor, max_losses=100)
    kills = data.draw(st.lists(st.tuples(st.integers(0, workers + 2), st.floats(0, 20)), max_size=4))
    names = list(range(workers))
    for who, when in kills:
        executor.cluster.kill(f"sim-{who}", when)
        executor.cluster.join(when + 0.5)
        names.append(len(names))
    stops = [t.steps for t in trials]
    answers = search.run(trials, stops)
    assert all(answer.metrics is not None for answer in answers)
    # Only boundaries are reported: every reported step is trained once. What was lost was never reported.
    assert search.plan.totals.steps_trained == len(histories(trials, stops))


@pytest.mark.ci
@given(searches(), st.data())
def test_a_new_driver_on_the_same_journal_continues_where_the_old_driver_stopped(trials, data):
    stops = [t.steps for t in trials]
    kept: set[StateKey] = set()
    first = Search(SimulatedExecutor(2, kept=kept))
    first.driver.add(trials)
    for added, stop in zip(trials, stops, strict=True):
        first.driver.ask(added.trial, stop)
    for _ in range(data.draw(st.integers(0, 12))):
        first.driver.wait()
        if is_idle(first.scheduler):
            break
    second = Search(SimulatedExecutor(2, kept=kept), first.journal)
    answers = second.run(trials, stops)
    assert second.plan.totals.steps_trained == len(histories(trials, stops))
    alone = Search(SimulatedExecutor(1))
    assert {(a.trial, a.metrics["value"]) for a in answers} == {
        (a.trial, a.metrics["value"]) for a in alone.run(trials, stops)
    }


@pytest.mark.ci
@given(searches(), st.data())
def test_lost_checkpoints_cost_at_most_the_steps_that_train_them_from_the_beginning(trials, data):
    kept: set[StateKey] = set()
    search = Search(SimulatedExecutor(2, kept=kept))
    halves = [max(1, t.steps // 2) for t in trials]
    search.run(trials, halves)
    depth = {
        state.kept.key: step
        for node in search.plan.nodes
        for step, state in node.states.items()
        if state.kept is not None
    }
    cost = 0
    for key in sorted(kept):
        if data.draw(st.booleans()):
            kept.discard(key)
            cost += depth[key]  # at worst it is trained again from the beginning
    for added in trials:
        search.driver.ask(added.trial, added.steps)
    search.answers(len(trials))
    unique = len(histories(trials, [t.steps for t in trials]))
    assert unique <= search.plan.totals.steps_trained <= unique + cost


@given(searches(most=6), st.data())
def test_requests_of_a_driver_that_left_are_no_longer_trained(trials, data):
    search = Search(SimulatedExecutor(1))
    search.driver.add(trials)
    other = DriverId("other")
    left = {t.trial for t in trials if data.draw(st.booleans())}
    search.driver.log.write([DriverJoined(other, "elsewhere", "a host", 0, 0.0)])
    for added in trials:
        if added.trial in left:
            search.driver.log.write([TargetAsked(added.trial, added.steps, other)])
        else:
            search.driver.ask(added.trial, added.steps)
    search.driver.wait(0.0)
    search.driver.log.write([DriverLeft(other, 0.0, "ended")])
    for _ in range(1000):
        search.driver.wait(0.0)
        validate_scheduler(search.scheduler)
        if is_idle(search.scheduler):
            break
        search.driver.wait()
    assert is_idle(search.scheduler)
    mine = [t for t in trials if t.trial not in left]
    # One chain was running when the other left.
    assert search.plan.totals.steps_trained <= len(histories(mine, [t.steps for t in mine])) + trials[0].steps


@given(searches(), st.integers(1, 3))
@settings(max_examples=20)
def test_without_sharing_every_trial_is_trained_separately(trials, workers):
    search = Search(SimulatedExecutor(workers), sharing=False)
    search.run(trials, [t.steps for t in trials])
    assert search.plan.totals.steps_trained == sum(t.steps for t in trials)
    assert merged(search.plan).rate == 1.0
    assert search.plan.totals.loads == 0, "from its beginning to its end, without a fork"


def test_trials_share_steps_until_their_different_gamma_takes_effect():
    search = Search(SimulatedExecutor(1))
    search.run(
        [
            trial(0, {"lr": s.multistep(0.1, milestones=[6], gamma=0.1)}, 8),
            trial(1, {"lr": s.multistep(0.1, milestones=[6], gamma=0.5)}, 8),
            trial(2, {"lr": s.exponential(0.1, gamma=0.9)}, 8),
        ],
        [8, 8, 8],
    )
    # 6 shared steps and 2 + 2; the exponential shares the first step only.
    assert search.plan.totals.steps_trained == 6 + 2 + 2 + 7


def test_a_grid_of_24_trials_trains_the_calculated_number_of_unique_steps():
    """120 epochs, lr0 x first drop x factor x late batch: 24 trials, 2,880 steps requested, 1,180 unique."""
    trials = []
    for lr0 in (0.1, 0.05):
        for drop in (60, 80, 100):
            for gamma in (0.1, 0.2):
                for late in (128, 256):
                    schedules = {
                        "lr": s.multistep(lr0, milestones=[drop], gamma=gamma),
                        "batch_size": s.piecewise({0: 128, 70: late}),
                    }
                    trials.append(trial(len(trials), schedules, 120))
    search = Search(SimulatedExecutor(4))
    search.run(trials, [120] * 24)
    assert merged(search.plan).steps_asked == 2880
    assert merged(search.plan).steps_unique == search.plan.totals.steps_trained == 1180
    assert round(merged(search.plan).rate, 6) == round(2880 / 1180, 6)
    assert round(merged(search.plan, search.plan.trials.values()).cost_weighted_rate, 6) == round(2880 / 1180, 6)


def test_a_plan_read_from_its_journal_equals_the_plan_of_the_search():
    search = Search(SimulatedExecutor(2))
    trials = [trial(i, {"lr": s.piecewise({0: 1, 3 + i: 2})}, 9) for i in range(4)]
    search.run(trials, [9] * 4)
    folded = open_plan(search.journal, WORKLOAD, {})
    assert folded.totals == search.plan.totals
    assert len(folded.nodes) == len(search.plan.nodes)
    for mine, theirs in zip(folded.nodes, search.plan.nodes, strict=True):
        assert (mine.start, mine.forms, mine.trained, mine.seconds) == (
            theirs.start,
            theirs.forms,
            theirs.trained,
            theirs.seconds,
        )
        known = {step: (s.metrics, s.kept) for step, s in mine.states.items() if s.metrics or s.kept}
        assert known == {step: (s.metrics, s.kept) for step, s in theirs.states.items() if s.metrics or s.kept}


def test_a_state_saved_under_the_key_of_another_state_is_refused_and_the_plan_is_unchanged() -> None:
    search = Search(SimulatedExecutor(1))
    search.driver.add([trial(0, {"a": s.constant(1)}, 8), trial(1, {"a": s.constant(2)}, 8)])
    plan = search.driver.plan
    one, other = plan.trials[TrialId("study/0")].last.ancestry()[0], plan.trials[TrialId("study/1")].last.ancestry()[0]
    for key in (plan.key(other, 4), plan.key(one, 5)):
        with pytest.raises(InternalError, match=f"was saved as {key}"):
            check(plan, StateReached(ChainId("c"), WorkerId("w"), one.id, 0, 4, 1.0, 1.0, kept=Kept(key, 1, "")))
        assert not one.states and not plan.kept and plan.totals.steps_trained == 0
    plan.apply(StateReached(ChainId("c"), WorkerId("w"), one.id, 0, 4, 1.0, 1.0, kept=Kept(plan.key(one, 4), 1, "")))
    validate(plan)
