"""Simulated workers that are slow or taken away, and several searches on one cluster of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstage import schedule as s
from hpstage.errors import UsageError
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.execution.simulated_cluster import Disruptions, Scaling, SimulatedCluster
from hpstage.plan.facts import DriverId, DriverJoined, StateKey, TrialAdded, TrialId
from hpstage.plan.messages import WorkerJoined
from hpstage.scheduler.answers import Answer
from hpstage.store import MemoryJournal
from tests.unit.searches import Search, histories, searches, trial

LONG = [trial(i, {"a": s.piecewise({0: 0, 20: i // 4, 40: i})}, 100) for i in range(16)]


def search_on(cluster: SimulatedCluster, trials: list[TrialAdded], every: int = 10) -> tuple[Search, dict[str, object]]:
    search = Search(SimulatedExecutor(cluster, save_seconds=0.1, load_seconds=0.1), checkpoint_every=every)
    answers = search.run(trials, [added.steps for added in trials])
    return search, {answer.trial: answer.metrics for answer in answers}


# --- disruptions ------------------------------------------------------------------------------------------


@pytest.mark.ci
@given(
    searches(steps=8),
    st.integers(1, 3),
    st.builds(
        Disruptions,
        slow=st.sampled_from([0.0, 0.5, 1.0]),
        lifetime_seconds=st.sampled_from([40.0, 200.0, math.inf]),
        notice_seconds=st.sampled_from([0.0, 0.5, 30.0]),
        replace_seconds=st.sampled_from([0.0, 2.0]),
        seed=st.integers(0, 5),
    ),
    st.booleans(),
)
def test_metrics_are_unchanged_when_simulated_workers_are_slow_or_taken_away(
    trials: list[TrialAdded], workers: int, disruptions: Disruptions, elastic: bool
) -> None:
    _, undisturbed = search_on(SimulatedCluster(workers), trials, every=1)
    scaling = Scaling(1, workers, 1.0) if elastic else None
    disturbed = SimulatedCluster(1 if elastic else workers, scaling=scaling, disruptions=disruptions)
    search, found = search_on(disturbed, trials, every=1)
    assert found == undisturbed
    assert search.plan.totals.steps_trained == len(histories(trials, [added.steps for added in trials]))
    assert disturbed.most <= workers


def test_workers_waste_seconds_only_if_they_are_taken_away_without_notice() -> None:
    distinct = len(histories(LONG, [100] * len(LONG)))
    spot = {"lifetime_seconds": 150.0, "replace_seconds": 5.0}
    noticed, _ = search_on(SimulatedCluster(4, disruptions=Disruptions(notice_seconds=5.0, **spot)), LONG)
    unnoticed, _ = search_on(SimulatedCluster(4, disruptions=Disruptions(**spot)), LONG)
    assert noticed.plan.totals.steps_trained == distinct
    assert noticed.plan.totals.wasted_seconds == 0.0 < unnoticed.plan.totals.wasted_seconds
    assert unnoticed.plan.totals.steps_trained == distinct  # those lost were never reported


def test_a_worker_with_a_notice_shorter_than_a_step_wastes_seconds() -> None:
    only = [trial(0, {"a": s.constant(1)}, 30)]
    cluster = SimulatedCluster(1, disruptions=Disruptions(lifetime_seconds=25.0, notice_seconds=0.3, replace_seconds=1))
    search, found = search_on(cluster, only, every=5)
    assert found and search.plan.totals.wasted_seconds


def test_slow_workers_train_and_are_allocated_longer_by_their_slowdown_factor() -> None:
    only = [trial(0, {"a": s.constant(1)}, 30)]
    search, _ = search_on(SimulatedCluster(1, disruptions=Disruptions(slow=1.0, slowdown=4.0)), only, every=100)
    assert search.plan.totals.train_seconds == pytest.approx(120.0)
    assert search.executor.cluster.paid_seconds == pytest.approx(search.executor.clock())


def test_disruptions_of_a_worker_depend_only_on_its_number_and_the_seed() -> None:
    one, same, other = (Disruptions(slow=0.5, lifetime_seconds=10.0, seed=seed) for seed in (1, 1, 2))
    assert [one.of(number) for number in range(50)] == [same.of(number) for number in reversed(range(50))][::-1]
    assert [one.of(number) for number in range(50)] != [other.of(number) for number in range(50)]
    mean = sum(one.of(number).lifetime for number in range(2000)) / 2000
    assert 9.0 < mean < 11.0
    assert 900 < sum(one.of(number).slowness == 3.0 for number in range(2000)) < 1100


def test_a_worker_is_allocated_until_taken_away_and_its_replacement_as_soon_as_requested() -> None:
    disruptions = Disruptions(lifetime_seconds=50.0, replace_seconds=20.0, seed=3)
    cluster = SimulatedCluster(1, disruptions=disruptions)
    lives = [disruptions.of(number).lifetime for number in range(3)]
    cluster.at(sum(lives) + 45.0, cluster.wake)
    executor = SimulatedExecutor(cluster)
    while cluster.now < sum(lives) + 45.0:
        executor.wait(None)
    assert cluster.paid_seconds == pytest.approx(cluster.now)  # one after the other, each while it starts, too
    assert cluster.most == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"slow": 1.5},
        {"slow": math.nan},
        {"slowdown": 0.5},
        {"lifetime_seconds": 0.0},
        {"notice_seconds": -1.0},
        {"replace_seconds": math.inf},
    ],
)
def test_invalid_settings_of_disruptions_are_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        Disruptions(**bad)


# --- several searches -------------------------------------------------------------------------------------


class Searching(Search):
    """A search next to others on one cluster and one plan."""

    def __init__(self, name: str, cluster: SimulatedCluster, journal: MemoryJournal, kept: set[StateKey]) -> None:
        executor = SimulatedExecutor(cluster, kept=kept)
        super().__init__(executor, journal, driver=DriverId(name), pool=executor.pool, checkpoint_every=1)
        self.driver.log.write([DriverJoined(DriverId(name), executor.pool, "a host", 0, 0.0)])
        self.wanted = 0
        self.answered: list[Answer] = []

    def begin(self, trials: list[TrialAdded]) -> None:
        self.driver.add(trials)
        for added in trials:
            self.driver.ask(added.trial, added.steps)
        self.wanted += len(trials)
        self.executor.cluster.wake()

    def turn(self) -> None:
        self.answered += self.driver.wait()


def run(searches: list[Searching], wanted: int) -> None:
    for _ in range(20_000):
        if sum(len(search.answered) for search in searches) == wanted:
            return
        for search in searches:
            search.turn()
    raise AssertionError("the searches hang")


@pytest.mark.parametrize("workers", [1, 3])
def test_searches_that_arrive_over_time_share_workers_and_train_every_unique_step_once(workers: int) -> None:
    cluster, journal, kept = SimulatedCluster(workers), MemoryJournal(), set[StateKey]()
    studies = [Searching(f"s{number}", cluster, journal, kept) for number in range(3)]
    added_trials = []
    for number, study in enumerate(studies):
        forks = [{0: 0, 10: i, 20: number if i % 2 else i} for i in range(4)]
        mine = [TrialAdded(TrialId(f"{number}/{i}"), {"a": s.piecewise(fork)}, 40) for i, fork in enumerate(forks)]
        added_trials += mine
        cluster.at(25.0 * number, lambda study=study, mine=mine: study.begin(mine))
    run(studies, len(added_trials))
    distinct = len(histories(added_trials, [added.steps for added in added_trials]))
    trained = [span for study in studies for span in study.executor.trained]
    assert sum(span.stop - span.start for span in trained) == distinct
    assert distinct / workers <= cluster.now <= distinct + 0.1  # the workers are those of all


def test_a_second_search_gets_the_present_workers_and_keeps_them_when_the_first_search_ends() -> None:
    cluster = SimulatedCluster(2)
    first = SimulatedExecutor(cluster)
    assert len(first.wait(None)) == 2
    second = SimulatedExecutor(cluster)
    assert [type(report) for report in second.wait(None)] == [WorkerJoined, WorkerJoined]
    first.close()
    cluster.join(5.0)
    assert len(second.wait(None)) == 1
    assert cluster.now == 5.0
