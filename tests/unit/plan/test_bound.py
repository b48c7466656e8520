"""The lower bound on makespans: true of every schedule, and more than the longest path and the mean load say."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstage.accounting.bound import Speeds, Work, lower_bound, speeds, tree_work
from hpstage.accounting.savings import seconds_alone, shortest_makespan
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.execution.simulated_cluster import SimulatedCluster
from hpstage.plan.step_times import ALONE, StepTimes
from hpstage.scheduler.widths import Widths
from tests.unit.scheduler.test_makespan import as_trials, random_tree
from tests.unit.searches import Search, searches

FLEETS = {
    "one chain each": {},
    "gangs": {"virtual_nodes": 4, "speedup": Widths().speedup},
    "gangs that lose nothing": {"virtual_nodes": 3},
    "siblings as one": {"slots": 3, "step_times": StepTimes(((1, 1.0), (3, 1.5)))},
}


def fleet_of(workers: int, slots: int = 1, step_times: StepTimes = ALONE, virtual_nodes: int = 1, speedup=float):
    return speeds(workers, slots=slots, step_times=step_times, widest=virtual_nodes, speedup=speedup)


# --- against schedules ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", FLEETS.values(), ids=FLEETS)
@pytest.mark.parametrize("evaluate_seconds", [0.0, 1.5])
def test_no_simulated_search_is_faster_than_the_lower_bound_of_its_makespan(options, evaluate_seconds) -> None:
    rng = random.Random(1)
    closest = 2.0
    for _ in range(60):
        workers, tree = rng.choice([1, 2, 3, 5]), random_tree(rng, rng.randint(2, 9))
        trains = {name: value for name, value in options.items() if name != "slots"}
        cluster = SimulatedCluster(workers, slots=options.get("slots", 1))
        search = Search(SimulatedExecutor(cluster, evaluate_seconds=evaluate_seconds, **trains))
        trials, stops = as_trials(tree)
        search.run(trials, stops, validate=False)
        least = shortest_makespan(search.plan, search.plan.trials.values(), workers, fleet_of(workers, **options))
        assert 0 < least <= search.executor.clock() * (1 + 1e-9)
        closest = min(closest, search.executor.clock() / least)
        if not options:
            totals, trials_of = search.plan.totals, search.plan.trials.values()
            longest = max(seconds_alone(search.plan, planned) for planned in trials_of)
            assert least >= max(longest, totals.worker_seconds / workers) * (1 - 1e-9)
    assert closest == pytest.approx(1.0)


@given(searches(), st.data())
def test_no_search_that_requests_steps_later_is_faster_than_the_lower_bound_of_its_makespan(trials, data) -> None:
    """A target beyond another is requested when that has its result, as an algorithm with rungs does; or at once."""
    workers = data.draw(st.integers(1, 4))
    executor = SimulatedExecutor(workers, evaluate_seconds=0.75)
    search = Search(executor)
    search.driver.add(trials)
    targets = {t.trial: sorted(data.draw(st.sets(st.integers(1, t.steps), min_size=1))) for t in trials}
    patient = {id: data.draw(st.booleans()) for id in targets}
    requested = dict.fromkeys(targets, 0)

    def ask(id) -> None:
        goal = requested[id] + 1 if patient[id] else len(targets[id])
        for step in targets[id][requested[id] : goal]:
            search.driver.ask(id, step)
        requested[id] = goal

    for id in targets:
        ask(id)
    left = sum(map(len, targets.values()))
    while left:
        for answer in search.driver.wait():
            left -= 1
            if requested[answer.trial] < len(targets[answer.trial]):
                ask(answer.trial)
    trials_of = search.plan.trials.values()
    together = shortest_makespan(search.plan, trials_of, workers)
    alone = shortest_makespan(search.plan, trials_of, workers, sharing=False)
    assert together <= executor.clock() * (1 + 1e-9)
    assert together <= alone * (1 + 1e-9)


# --- against what it replaces, and against brute force ----------------------------------------------------

works = st.builds(
    Work, st.integers(0, 12).map(float), st.integers(1, 9).map(float), st.sampled_from([0.5, 1.0, 3.0, 7.5])
)
trees = st.lists(works, min_size=1, max_size=12)


@given(trees, st.integers(1, 9))
def test_the_lower_bound_is_at_least_longest_path_and_mean_load_and_falls_with_more_workers(tree, workers) -> None:
    least = lower_bound(tree, workers)
    assert least >= max(work.depth + work.seconds for work in tree) - 1e-9
    assert least >= sum(work.worker_seconds for work in tree) / workers - 1e-9
    assert lower_bound(tree, workers + 1) <= least + 1e-9


@given(trees, st.integers(1, 9))
def test_the_lower_bound_equals_the_maximum_over_all_depths_of_a_fine_grid(tree, workers) -> None:
    """On a grid of quarter seconds, which has all depths at which work begins or ends."""

    def after(depth: float) -> float:
        return sum(
            work.worker_seconds * min(1.0, max(0.0, work.depth + work.seconds - depth) / work.seconds) for work in tree
        )

    deepest = max(work.depth + work.seconds for work in tree)
    grid = [quarter / 4 for quarter in range(int(4 * deepest) + 1)]
    assert lower_bound(tree, workers) == pytest.approx(max(depth + after(depth) / workers for depth in grid))


def test_the_lower_bound_exceeds_the_mean_load_if_400_trials_share_a_narrow_trunk() -> None:
    """Lines alive from these steps on, of 30 s each: while they are fewer than the workers, some workers are idle."""
    alive = {0: 6, 40: 24, 60: 42, 80: 0}
    hour, whole = 3600.0, 191.6
    tree = [
        Work(30.0 * start, 30.0 * (stop - start), 30.0 * (stop - start))
        for (start, lines), (stop, _) in pairwise(alive.items())
        for _ in range(lines)
    ]
    beyond = (whole * hour - sum(work.worker_seconds for work in tree)) / 328
    tree += [Work(80 * 30.0, beyond, beyond)] * 328
    assert [round(lower_bound(tree, workers) / hour, 2) for workers in (8, 40, 128)] == [24.03, 5.14, 2.06]
    assert [round(whole / workers, 2) for workers in (8, 40, 128)] == [23.95, 4.79, 1.50]
    assert lower_bound(tree, 1000) == pytest.approx(80 * 30.0 + beyond)


# --- of a tree --------------------------------------------------------------------------------------------


def planned(tree, **options):
    search = Search(SimulatedExecutor(1, **options))
    trials, stops = as_trials(tree)
    search.run(trials, stops)
    return [(trial, sorted(trial.targets)) for trial in search.plan.trials.values()]


def test_tree_work_counts_shared_steps_once_and_an_evaluation_at_each_requested_step() -> None:
    """A trunk of 4 steps, then branches of 3 and 5; evaluated at their ends."""
    tree = planned([(-1, 4), (0, 3), (0, 5)])
    found = sorted(tree_work(tree, lambda node: 2.0, 0.5))
    assert found == [(0.0, 8.0, 8.0), (8.0, 6.0, 6.0), (8.0, 10.0, 10.0), (14.0, 0.5, 0.5), (18.0, 0.5, 0.5)]


def test_an_evaluation_delays_later_steps_only_if_all_trials_that_reach_them_request_it() -> None:
    [(short, _), (long, _)] = planned([(-1, 4), (0, 3), (0, 5)])
    both = list(tree_work([(short, [4, 7]), (long, [4, 9])], lambda node: 1.0, 0.5))
    assert max(work.depth + work.seconds for work in both) == 9 + 2 * 0.5
    one = list(tree_work([(short, [4, 7]), (long, [9])], lambda node: 1.0, 0.5))
    assert max(work.depth + work.seconds for work in one) == 9 + 0.5
    assert sum(work.worker_seconds for work in both) == sum(work.worker_seconds for work in one) == 12 + 3 * 0.5


def test_gangs_shorten_the_time_of_a_branch_and_stacking_reduces_its_worker_seconds() -> None:
    assert fleet_of(8, virtual_nodes=4) == Speeds(branch=4.0)
    assert fleet_of(3, virtual_nodes=4) == Speeds(branch=3.0)
    assert fleet_of(8, virtual_nodes=4, speedup=Widths().speedup) == Speeds(branch=pytest.approx(1.8**2))
    assert fleet_of(2, slots=4, step_times=StepTimes(((1, 1.0), (4, 2.0)))) == Speeds(worker=2.0, evaluations=4)
    [(trial, _)] = planned([(-1, 8)])
    for fleet, trained in ((Speeds(branch=4.0), (0.0, 2.0, 8.0)), (Speeds(worker=2.0), (0.0, 8.0, 4.0))):
        assert [*tree_work([(trial, [8])], lambda node: 1.0, 0.0, fleet)] == [trained, (trained[1], 0.0, 0.0)]
