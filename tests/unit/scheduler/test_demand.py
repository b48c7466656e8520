"""How many workers a search requests, and what a fleet costs that follows it."""

from __future__ import annotations

from collections.abc import Sequence

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.execution.simulated_cluster import Scaling, SimulatedCluster
from hpstage.plan.facts import DriverId, DriverJoined, TrialAdded
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Failing
from tests.unit.searches import Search, histories, searches, trial

START = 10.0


def branches(count: int, fork: int, steps: int, first: int = 0) -> list[TrialAdded]:
    """Trials that are equal up to a fork."""
    return [
        trial(number, {"a": s.piecewise({0: -1 - first, fork: number})}, steps)
        for number in range(first, first + count)
    ]


def ask(search: Search, trials: Sequence[TrialAdded]) -> None:
    search.driver.add(trials)
    for added in trials:
        search.driver.ask(added.trial, added.steps)


def demands(search: Search, answers: int) -> list[tuple[float, int]]:
    """The demand at each report until so many targets are answered, with its time."""
    found = []
    while answers:
        answers -= len(search.driver.wait())
        now = search.executor.clock()
        found.append((now, search.scheduler.demands.at(now, START)))
    return found


def test_workers_for_branches_are_requested_one_worker_start_before_the_fork() -> None:
    search = Search(SimulatedExecutor(1), checkpoint_every=1)
    ask(search, branches(6, 50, 100))
    wanted = dict(demands(search, 1))
    assert {wanted[float(at)] for at in range(1, 40)} == {1}
    assert {wanted[float(at)] for at in range(41, 50)} == {6}


def test_no_worker_is_requested_that_would_train_for_less_time_than_it_takes_to_start() -> None:
    search = Search(SimulatedExecutor(1), checkpoint_every=1)
    ask(search, branches(6, 50, 56))  # 36 seconds of work when the others come
    assert max(workers for _, workers in demands(search, 1)) == 3


def test_only_one_worker_is_requested_before_seconds_per_step_are_known() -> None:
    search = Search(SimulatedExecutor(1, step_seconds=100.0), checkpoint_every=1)
    assert search.scheduler.demands.at(0.0, START) == 0
    ask(search, branches(6, 0, 10))
    search.driver.wait()
    assert search.scheduler.demands.at(0.0, START) == 1
    search.driver.wait()
    assert search.scheduler.demands.at(search.executor.clock(), START) == 6


def test_remaining_work_estimates_the_steps_trained_since_the_last_report() -> None:
    search = Search(SimulatedExecutor(2, step_seconds=2.0), checkpoint_every=None)
    ask(search, [trial(0, {"a": s.constant(0)}, 20), trial(1, {"a": s.constant(1)}, 100)])
    while search.plan.totals.steps_trained < 2:
        search.driver.wait()
    now = search.executor.clock()
    estimates = [search.scheduler.remaining_work(now + seconds) for seconds in (0, 10, 30, 1000)]
    assert [one.steps_left for one in estimates] == [118] * 4  # as reported
    assert estimates[0].steps_since == 0
    assert estimates[1].steps_since == pytest.approx(10, abs=2)
    assert estimates[2].steps_since == pytest.approx(30, abs=2)
    assert estimates[3].steps_since <= 116  # that of no report is never taken for trained


def test_an_idle_worker_is_kept_for_as_long_as_a_worker_takes_to_start() -> None:
    search = Search(SimulatedExecutor(3), checkpoint_every=1)
    ask(search, [trial(0, {"a": s.constant(0)}, 60), *branches(2, 0, 20, first=1)])
    wanted = dict(demands(search, 3))
    assert wanted[19.0] == wanted[20.0] == wanted[29.0] == 3
    assert wanted[31.0] == wanted[59.0] == 1
    assert search.scheduler.demands.at(100.0, START) == 0


@pytest.mark.parametrize(
    ("driver", "other", "same_pool", "counts"), [("a", "b", 1, 1), ("b", "a", 1, 0), ("b", "a", 0, 1)]
)
def test_only_one_of_two_drivers_on_the_same_workers_requests_workers(
    driver: str, other: str, same_pool: int, counts: int
) -> None:
    executor = SimulatedExecutor(1)
    search = Search(executor, driver=DriverId(driver), pool=executor.pool, checkpoint_every=1)
    search.driver.log.write([DriverJoined(DriverId(driver), executor.pool, "host", 1, 0.0)])
    search.driver.log.write([DriverJoined(DriverId(other), executor.pool if same_pool else "another", "host", 2, 0.0)])
    ask(search, branches(6, 0, 100))
    while not search.plan.totals.steps_trained:
        search.driver.wait()
    assert search.scheduler.demands.at(executor.clock(), START) == 6 * counts


@pytest.mark.ci
@given(searches(), st.integers(1, 4), st.sampled_from([0.0, 0.5, 3.0, 20.0]), st.sampled_from([1, 4, 10**9]))
def test_an_elastic_fleet_gives_the_metrics_of_one_worker_and_trains_no_step_twice(
    trials: list[TrialAdded], maximum: int, start_seconds: float, every: int
) -> None:
    stops = [added.steps for added in trials]
    fixed = Search(SimulatedExecutor(1), checkpoint_every=every)
    expected = {answer.trial: answer.metrics for answer in fixed.run(trials, stops)}
    executor = SimulatedExecutor(SimulatedCluster(1, scaling=Scaling(1, maximum, start_seconds)))
    search = Search(executor, checkpoint_every=every)
    assert {answer.trial: answer.metrics for answer in search.run(trials, stops)} == expected
    assert search.plan.totals.steps_trained == len(histories(trials, stops))
    assert executor.cluster.most <= maximum
    paid = executor.cluster.paid_seconds
    present = search.driver.accounting.presence.seconds()
    assert search.plan.totals.worker_seconds - 1e-6 <= present <= paid + 1e-6
    assert start_seconds or present == pytest.approx(paid)  # what a start costs is paid from its request


SHAPES = {
    "grid": [trial(i, {"a": s.constant(i // 12), "b": s.piecewise({0: 0, 40: i // 3, 80: i})}, 120) for i in range(48)],
    "trunk": branches(100, 90, 120),
    "uneven": [trial(i, {"a": s.piecewise({0: 0, 10 + i: i})}, 60 + 5 * i) for i in range(12)],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.ci
def test_an_elastic_fleet_is_rarely_idle_and_as_fast_as_a_fixed_fleet_of_its_size(shape: str) -> None:
    trials, stops = SHAPES[shape], [added.steps for added in SHAPES[shape]]
    seconds = {"step_seconds": 60.0, "load_seconds": 1.0, "save_seconds": 1.0, "evaluate_seconds": 5.0}
    elastic = SimulatedExecutor(SimulatedCluster(1, scaling=Scaling(1, 8, 60.0)), **seconds)
    search = Search(elastic, checkpoint_every=10)
    search.run(trials, stops, validate=False)
    assert elastic.cluster.paid_seconds <= 1.10 * search.plan.totals.worker_seconds
    fixed = SimulatedExecutor(elastic.cluster.most, **seconds)
    Search(fixed, checkpoint_every=10).run(trials, stops, validate=False)
    assert elastic.clock() <= 1.05 * fixed.clock()


def milestones(trial: optuna.Trial) -> dict[str, object]:
    first, second = trial.suggest_categorical("first", [40, 60, 80]), trial.suggest_categorical("second", [100, 120])
    gamma = trial.suggest_categorical("gamma", [0.1, 0.5])
    return {
        "lr": s.multistep(trial.suggest_categorical("lr", [0.1, 0.05]), milestones=[first, second], gamma=gamma),
        "momentum": trial.suggest_categorical("momentum", [0.9, 0.95]),
        "batch": s.piecewise({0: 64, trial.suggest_categorical("grow_at", [80, 120]): 256}),
    }


def halved(executor: SimulatedExecutor) -> float:
    """Halve 64 trials, and return the worker-seconds used."""
    result = hpstage.optimize(
        optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)), Failing(), milestones, metric="value",
        steps=160, n_trials=64, algorithm=SuccessiveHalving(10, 4), executor=executor, store=MemoryJournal(),
    )  # fmt: skip
    return result.savings.worker_seconds


@pytest.mark.ci
def test_an_elastic_fleet_is_as_fast_as_a_fixed_fleet_under_successive_halving() -> None:
    seconds = {"step_seconds": 21.5, "evaluate_seconds": 5.0, "load_seconds": 1.0, "save_seconds": 1.0}
    elastic = SimulatedExecutor(SimulatedCluster(1, scaling=Scaling(1, 16, 120.0)), **seconds)
    used = halved(elastic)
    fixed = SimulatedExecutor(elastic.cluster.most, **seconds)
    halved(fixed)
    assert elastic.cluster.paid_seconds <= 1.10 * used
    assert elastic.clock() <= 1.05 * fixed.clock()
