"""Several drivers on one plan: what two want is trained once, and what one leaves undone the other takes over."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpstage import schedule as s
from hpstage.accounting.accounting import accounted
from hpstage.accounting.savings import merged
from hpstage.checkpoints.eviction import Eviction
from hpstage.driver.driver import Driver
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import (
    ChainClosed,
    ChainId,
    ChainProlonged,
    ChainStarted,
    DriverId,
    DriverJoined,
    DriverLeft,
    Span,
    StageFailed,
    StateKey,
    StateReached,
    TrialAdded,
    TrialId,
    UserFailure,
    WorkerId,
)
from hpstage.plan.log import open_plan
from hpstage.scheduler.answers import Answer
from hpstage.scheduler.scheduler import Scheduler
from hpstage.store.memory import MemoryJournal
from tests.invariants import is_idle, validate_scheduler
from tests.unit.searches import WORKLOAD, histories, schedules


class Study:
    """One driver with workers of its own, and what it was answered."""

    def __init__(
        self,
        name: str,
        journal: MemoryJournal,
        kept: set[StateKey],
        workers: int = 2,
        *,
        every: int = 10**9,
        eviction: Eviction | None = None,
        evaluate_seconds: float = 0.0,
    ) -> None:
        self.name = name
        self.executor = SimulatedExecutor(workers, kept=kept, state_bytes=1, evaluate_seconds=evaluate_seconds)
        self.plan = open_plan(journal, WORKLOAD, {})
        self.scheduler = Scheduler(self.plan, driver=DriverId(name), pool=name, checkpoint_every=every)
        self.driver = Driver(self.plan, self.scheduler, self.executor, journal, eviction=eviction)
        self.driver.log.write([DriverJoined(DriverId(name), name, "a host", 0, 0.0)])
        self.requests = 0
        self.answers: list[Answer] = []

    def ask(self, trials: list[TrialAdded], stops: list[int]) -> None:
        mine = [TrialAdded(TrialId(f"{self.name}/{i}"), added.schedules, added.steps) for i, added in enumerate(trials)]
        self.driver.add(mine)
        for added, stop in zip(mine, stops, strict=True):
            self.driver.ask(added.trial, stop)
        self.driver.log.write([])  # requests are written with the next facts
        self.requests += len(mine)

    @property
    def done(self) -> bool:
        return len(self.answers) >= self.requests

    def turn(self) -> None:
        self.answers += self.driver.wait()
        validate_scheduler(self.scheduler)


def run(studies: list[Study], choose: random.Random, turns: int = 5000) -> None:
    for _ in range(turns):
        if all(study.done for study in studies):
            return
        choose.choice(studies).turn()
    raise AssertionError("the drivers hang")


@st.composite
def searches(draw: st.DrawFn) -> tuple[list[TrialAdded], list[int]]:
    count = draw(st.integers(1, 5))
    trials = [TrialAdded(TrialId(str(i)), {"a": draw(schedules(8)), "b": draw(schedules(8))}, 8) for i in range(count)]
    return trials, [draw(st.integers(1, 8)) for _ in range(count)]


@pytest.mark.ci
@given(st.lists(searches(), min_size=2, max_size=3), st.integers())
def test_concurrent_drivers_train_every_unique_step_once(wishes, seed):
    journal, kept = MemoryJournal(), set()
    studies = [Study(f"s{i}", journal, kept) for i in range(len(wishes))]
    for study, (trials, stops) in zip(studies, wishes, strict=True):
        study.ask(trials, stops)
    run(studies, random.Random(seed))
    everything = [trial for trials, _ in wishes for trial in trials]
    stops = [stop for _, stops in wishes for stop in stops]
    final = open_plan(journal, WORKLOAD, {})
    assert final.totals.steps_trained == len(histories(everything, stops)) == merged(final).steps_unique
    for study, (trials, _) in zip(studies, wishes, strict=True):
        assert len(study.answers) == len(trials)
        for answer in study.answers:
            planned = final.trials[answer.trial]
            assert answer.metrics == planned.node_at(answer.step).states[answer.step].metrics


@pytest.mark.ci
@given(st.lists(searches(), min_size=2, max_size=2), st.integers(), st.integers(1, 12))
def test_a_driver_completes_its_trials_after_another_driver_of_the_plan_is_declared_dead(wishes, seed, when):
    journal, kept = MemoryJournal(), set()
    choose = random.Random(seed)
    dying, other = (Study(name, journal, kept) for name in ("dying", "other"))
    dying.ask(*wishes[0])
    other.ask(*wishes[1])
    for _ in range(when):
        choose.choice([dying, other]).turn()
    # kill -9: whatever it had in flight is lost, and it says nothing more.
    other.driver.log.write([DriverLeft(DriverId("dying"), 0.0, "gone")])
    run([other], choose)
    other.driver.finish()
    validate_scheduler(other.scheduler)
    assert not [chain for chain in other.plan.chains.values() if chain.driver == "dying"]


@pytest.mark.parametrize("seed", range(20))
def test_three_concurrent_drivers_end_with_equal_plans(seed: int) -> None:
    choose = random.Random(seed)
    journal, kept = MemoryJournal(), set()
    studies = [Study(f"s{i}", journal, kept) for i in range(3)]
    for study in studies:
        trials = [
            TrialAdded(TrialId(str(i)), {"a": s.piecewise({0: choose.choice([1, 2]), 3: choose.choice([1, 2, 3])})}, 8)
            for i in range(4)
        ]
        study.ask(trials, [choose.randint(1, 8) for _ in trials])
        for _ in range(choose.randint(0, 5)):
            choose.choice(studies).turn()
    run(studies, choose)
    for study in studies:
        study.turn()
    views = [
        (
            [(node.start, node.trained, sorted(node.states)) for node in study.plan.nodes],
            study.plan.totals.steps_trained,
            merged(study.plan).steps_asked,
            merged(study.plan).steps_unique,
        )
        for study in studies
    ]
    assert views[0] == views[1] == views[2]


@pytest.mark.ci
@given(searches(), searches(), st.integers(), st.integers(0, 12))
def test_a_driver_trains_no_step_again_after_another_driver_has_finished_and_left(mine, theirs, seed, when):
    journal, kept = MemoryJournal(), set()
    choose = random.Random(seed)
    leaving, other = (Study(name, journal, kept) for name in ("leaving", "other"))
    leaving.ask(*mine)
    other.ask(*theirs)
    for _ in range(when):
        choose.choice([leaving, other]).turn()
    while not leaving.done:
        choose.choice([leaving, other]).turn()
    leaving.driver.finish()
    validate_scheduler(leaving.scheduler)
    leaving.driver.leave()
    run([other], choose)
    final = open_plan(journal, WORKLOAD, {})
    assert final.totals.steps_trained == merged(final).steps_unique
    assert accounted(final, journal).whole().steps_wasted == 0


def test_a_driver_with_all_its_results_stops_training_the_requests_of_other_drivers() -> None:
    journal, kept = MemoryJournal(), set()
    leaving, other = (Study(name, journal, kept, workers=1) for name in ("leaving", "other"))
    trial = TrialAdded(TrialId("0"), {"a": s.constant(1)}, 1000)
    leaving.ask([trial], [10])
    other.ask([trial], [1000])
    while not leaving.done:
        leaving.turn()
    leaving.driver.finish()
    assert 10 <= leaving.plan.totals.steps_trained <= 15
    leaving.driver.leave()
    run([other], random.Random(0))
    assert other.plan.totals.steps_trained == 1000


@pytest.mark.parametrize("newcomer", [False, True])
def test_a_driver_does_not_train_steps_ahead_of_a_running_chain_of_another_driver(newcomer: bool) -> None:
    # A chain of another's over steps 0 to 4 of a node, which then continues to 8 of the same.
    journal = MemoryJournal()
    trials = [TrialAdded(TrialId(name), {"a": s.constant(1)}, 8) for name in ("t", "u")]
    other = Study("other", journal, set())
    other.ask(trials, [4, 8])
    node = other.plan.nodes[0].id
    begun = [
        DriverJoined(DriverId("first"), "first", "a host", 0, 0.0),
        ChainStarted(ChainId("first-1"), DriverId("first"), WorkerId("w"), (Span(node, 0, 4),), 0.0),
        ChainProlonged(ChainId("first-1"), (Span(node, 4, 8),)),
    ]
    other.driver.log.write(begun)
    if newcomer:
        other = Study("newcomer", journal, set())
        other.ask(trials, [4, 8])
    for step in (0, 2, 4, 6):  # as the first reports
        if step:
            metrics: dict[str, float | str] | None = {"score": 1.0} if step == 4 else None
            chain = ChainId("first-1")
            other.driver.log.write(
                [StateReached(chain, WorkerId("w"), node, step - 2, step, 0.0, 0.1, metrics=metrics)]
            )
        for _ in range(3):
            other.turn()
        assert len(other.scheduler.workers) == 2 and set(other.plan.chains) == {"first-1"}
        assert other.plan.totals.steps_trained == step
    other.driver.log.write([ChainClosed(ChainId("first-1"), 0.0)])  # it gives up: now it is the other's
    run([other], random.Random(0))


@pytest.mark.parametrize("newcomer", [False, True])
def test_a_kept_state_whose_evaluation_two_drivers_request_is_evaluated_once(newcomer: bool) -> None:
    journal, kept = MemoryJournal(), set[StateKey]()
    one, other = (Study(name, journal, kept, workers=1, every=4, evaluate_seconds=1.0) for name in ("one", "other"))
    trial = TrialAdded(TrialId("0"), {"a": s.constant(1)}, 8)
    one.ask([trial], [8])
    run([one], random.Random(0))
    [node] = one.plan.nodes
    assert node.states[4].kept is not None and node.states[4].metrics is None
    one.driver.ask(TrialId("one/0"), 4)
    one.driver.wait(0.0)
    assert [chain.driver for chain in one.plan.chains.values()] == ["one"]
    if newcomer:
        other = Study("newcomer", journal, kept, workers=1, every=4, evaluate_seconds=1.0)
    other.ask([trial], [4])
    other.driver.wait(0.0)
    assert [chain.driver for chain in other.plan.chains.values()] == ["one"]
    one.requests += 1
    run([one, other], random.Random(0))
    assert one.plan.totals.evaluations == 2


def test_a_failed_stage_fails_for_concurrent_drivers_and_is_trained_again_by_a_later_driver() -> None:
    journal, kept = MemoryJournal(), set[StateKey]()
    line = [TrialAdded(TrialId("0"), {"a": s.constant(1), "b": s.constant(1)}, 8)]
    first = Study("first", journal, kept)
    first.ask(line, [8])
    [node] = first.plan.nodes
    failure = UserFailure("ValueError: here", "its traceback")
    first.driver.log.write([StageFailed(node.id, 4, False, failure)])
    first.ask([TrialAdded(TrialId("1"), line[0].schedules, 8)], [6])  # is known, and waits for nothing
    first.turn()
    assert {answer.failure for answer in first.answers} == {failure}
    second = Study("second", journal, kept)  # or the first, killed and called again
    assert is_idle(second.scheduler)
    second.ask(line, [6])
    second.turn()
    assert [(answer.metrics, answer.failure) for answer in second.answers] == [(None, failure)]
    second.ask([TrialAdded(TrialId("1"), line[0].schedules, 8)], [3])  # before it, all is well
    run([second], random.Random(0))
    assert second.answers[-1].metrics is not None
    for study in (first, second):
        assert study.plan.totals.steps_trained == (0 if study is first else 3)
        study.driver.finish()
        study.driver.leave()
    later = Study("later", journal, kept)
    later.ask(line, [8])
    run([later], random.Random(0))
    assert later.answers[0].metrics is not None
