"""States at intervals, and stops, wherever a chain is on a course of several pieces."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import merged
from hpstage.checkpoints import FolderCheckpoints
from hpstage.driver.driver import Driver
from hpstage.errors import ClusterError
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import StateKey, StateReached, TrialAdded, WorkerId
from hpstage.plan.log import open_plan
from hpstage.plan.messages import BoundaryReached, Report
from hpstage.plan.plan import SearchPlan
from hpstage.scheduler.answers import Answer
from hpstage.scheduler.scheduler import Scheduler
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape, alone
from tests.invariants import validate_scheduler
from tests.unit.searches import WORKLOAD, Search, histories, trial

pytestmark = pytest.mark.sampled(4)


@st.composite
def courses(draw: st.DrawFn, steps: int) -> dict[str, s.Schedule]:
    """Schedules of several pieces with equal beginnings."""
    cuts = st.integers(1, steps - 1)
    drops = sorted(draw(st.sets(cuts, min_size=1, max_size=3)))
    warmup = draw(st.integers(0, steps // 4))
    decay = draw(st.integers(1, steps // 2))
    return {
        "lr": draw(st.sampled_from([s.multistep(0.5, drops), s.wsd(0.5, steps, warmup=warmup, decay=decay)])),
        "batch": s.piecewise({0: 64, draw(cuts): 128}),
        "wd": draw(st.sampled_from([s.constant(0.1), s.piecewise({0: 0.1, draw(cuts): 0.2})])),
    }


@st.composite
def searches(draw: st.DrawFn) -> list[TrialAdded]:
    steps = draw(st.sampled_from([12, 40]))
    return [trial(i, draw(courses(steps)), steps) for i in range(draw(st.integers(1, 4)))]


def stops_of(trials: list[TrialAdded]) -> list[int]:
    return [added.steps for added in trials]


def kept_at(plan: SearchPlan, number: int) -> list[int]:
    """The steps at which a state of the trial is kept."""
    planned = plan.trials[trial(number, {}, 1).trial]
    states = ((step, planned.node_at(step).states.get(step)) for step in range(1, planned.steps + 1))
    return [step for step, state in states if state is not None and state.kept is not None]


class Watched(SimulatedExecutor):
    """Notes what each death costs."""

    def __init__(self, workers: int, **options: Any) -> None:
        self.lost: list[int] = []
        super().__init__(workers, **options)

    def lose(self, slots: Sequence[WorkerId]) -> None:
        for worker in slots:
            self.lost += [flight.progress(self.clock())[0] - flight.kept for flight in self.under_way(worker)]
        super().lose(slots)

    def under_way(self, worker: WorkerId | None = None) -> Iterator[Any]:
        return (flight for flight in self._flights.values() if worker in (None, flight.worker))


# --- at intervals -----------------------------------------------------------------------------------------


def test_every_tenth_step_is_saved_across_two_drops_of_the_learning_rate() -> None:
    search = Search(SimulatedExecutor(1, step_seconds=10.0), checkpoint_every=10)
    search.run([trial(0, {"lr": s.multistep(0.1, [100, 200])}, 300)], [300])
    assert kept_at(search.plan, 0) == list(range(10, 301, 10))


def test_each_minute_of_training_is_saved_by_default_across_two_drops_of_the_learning_rate() -> None:
    search = Search(SimulatedExecutor(1, step_seconds=10.0), checkpoint_every=None)
    search.run([trial(0, {"lr": s.multistep(0.1, [100, 200])}, 300)], [300])
    kept = kept_at(search.plan, 0)
    assert max(b - a for a, b in pairwise([0, *kept])) == 6
    assert {100, 200, 300} <= set(kept)
    assert len(kept) <= 52


def test_every_step_but_the_first_is_saved_if_a_step_takes_longer_than_the_interval() -> None:
    search = Search(SimulatedExecutor(1, step_seconds=100.0), checkpoint_every=None)
    search.run([trial(0, {"lr": s.multistep(0.1, [4])}, 8)], [8])
    assert kept_at(search.plan, 0) == [2, 3, 4, 5, 6, 7, 8], "the first is timed"


@given(trials=searches(), every=st.integers(1, 15), workers=st.integers(1, 4))
@settings(max_examples=15)
def test_every_kth_step_of_every_trial_is_saved_wherever_its_schedules_change(trials, every, workers):
    search = Search(SimulatedExecutor(workers), checkpoint_every=every)
    search.run(trials, stops_of(trials))
    for number, added in enumerate(trials):
        assert set(range(every, added.steps + 1, every)) <= set(kept_at(search.plan, number))
    assert search.plan.totals.steps_trained == len(histories(trials, stops_of(trials)))


@given(trials=searches(), every=st.integers(1, 15), workers=st.integers(1, 3), data=st.data())
@settings(max_examples=20)
def test_the_death_of_a_worker_costs_fewer_steps_than_the_checkpoint_interval(trials, every, workers, data):
    executor = Watched(workers, load_seconds=data.draw(st.sampled_from([0.0, 0.7])))
    search = Search(executor, checkpoint_every=every, max_losses=1000)
    for number in range(data.draw(st.integers(1, 4))):
        # Never at the very moment at which a step ends, wherever it began: then it is over and not kept yet.
        executor.cluster.kill(WorkerId(f"sim-{number}"), data.draw(st.integers(0, 60)) + 0.13 * (number + 1))
        executor.cluster.join(data.draw(st.integers(0, 60)) + 0.5)
    search.run(trials, stops_of(trials))
    assert all(0 <= lost < every for lost in executor.lost)
    assert search.plan.totals.steps_trained == len(histories(trials, stops_of(trials)))


def test_the_death_of_a_worker_costs_no_step_right_after_a_checkpoint() -> None:
    executor = Watched(1)
    search = Search(executor, checkpoint_every=10)
    executor.cluster.kill(WorkerId("sim-0"), 190.5)
    executor.cluster.join(200.0)
    search.run([trial(0, {"lr": s.multistep(0.1, [100, 200])}, 300)], [300])
    assert executor.lost == [0]
    assert executor.clock() == 200.0 + 110.0


def test_worker_deaths_in_a_stage_count_together_whether_or_not_the_chain_began_there() -> None:
    """The stage from step 5 on kills three workers: one that came from before, two that began there."""
    executor = SimulatedExecutor(1)
    search = Search(executor, checkpoint_every=None)
    for number, (killed, joined) in enumerate([(5.5, 6.0), (6.5, 7.0), (7.5, 8.0)]):
        executor.cluster.kill(WorkerId(f"sim-{number}"), killed)
        executor.cluster.join(joined)
    [answer] = search.run([trial(0, {"lr": s.multistep(0.1, [5])}, 10)], [10])
    assert answer.failure is not None
    assert "3 workers died in a row while training from step 5 (lr=0.01" in answer.failure.summary


def test_worker_deaths_are_counted_since_the_last_saved_state() -> None:
    executor = SimulatedExecutor(1)
    search = Search(executor, checkpoint_every=None)
    for number, (killed, joined) in enumerate([(1.5, 2.0), (2.5, 3.0), (3.5, 4.0)]):
        executor.cluster.kill(WorkerId(f"sim-{number}"), killed)
        executor.cluster.join(joined)
    [answer] = search.run([trial(0, {"lr": s.constant(1)}, 10)], [10])
    assert answer.failure is not None
    assert answer.failure.summary.startswith("3 workers died in a row while training from step 0")


def test_a_worker_that_reports_another_state_key_is_named_and_its_states_are_refused() -> None:
    class Other(SimulatedExecutor):
        def wait(self, timeout: float | None) -> list[Report]:
            return [self._other(report) for report in super().wait(timeout)]

        def _other(self, report: Report) -> Report:
            if isinstance(report, BoundaryReached) and report.reached.kept is not None and report.reached.step == 7:
                reached = report.reached
                return BoundaryReached(replace(reached, kept=replace(reached.kept, key=StateKey("0" * 32))))
            return report

    search = Search(Other(1), checkpoint_every=7)
    with pytest.raises(ClusterError, match="sim-0 computes another key for the state at step 7"):
        search.run([trial(0, {"lr": s.cosine(0.1, 20), "b": s.constant(1)}, 20)], [20])
    assert kept_at(search.plan, 0) == []


# --- stops ------------------------------------------------------------------------------------------------


@given(trials=searches(), every=st.sampled_from([1, 7, None]), workers=st.integers(1, 4), data=st.data())
@settings(max_examples=20)
def test_a_stop_takes_effect_within_one_step_and_no_step_is_trained_again(trials, every, workers, data):
    executor = Watched(workers, step_seconds=3.0, load_seconds=data.draw(st.sampled_from([0.0, 0.7])))
    search = Search(executor, checkpoint_every=every)
    search.driver.add(trials)
    for added in trials:
        search.driver.ask(added.trial, added.steps)
    answers: list[Answer] = []
    for moment in sorted(data.draw(st.lists(st.floats(0.0, 150.0), min_size=1, max_size=3))):
        executor.cluster.join(max(0.0, moment - executor.clock()))  # an event that the driver receives
        while executor.clock() < moment - 1e-9:  # a sum is rounded, and nothing else may come
            answers += search.driver.wait()
        underway = {flight.chain.id: flight.progress(executor.clock())[0] for flight in executor.under_way()}
        stopped_at, trained = executor.clock(), sum(span.stop - span.start for span in executor.trained)
        reported = {flight.chain.id: flight.counted_from for flight in executor.under_way()}
        search.driver.finish()
        validate_scheduler(search.scheduler)
        after = sum(span.stop - span.start for span in executor.trained) - trained
        assert after <= sum(underway[id] + 1 - reported[id] for id in underway)
        assert executor.clock() <= stopped_at + 3.0 + 0.7
        assert search.driver.accounting.whole().steps_wasted == 0
    while len(answers) < len(trials):
        answers += search.driver.wait()
    assert search.plan.totals.steps_trained == len(histories(trials, stops_of(trials)))
    assert search.driver.accounting.whole().steps_wasted == 0


class Counted(Tape):
    """Wakes the executor at given counts of steps; all copies count together."""

    stateless = ("_executor", "_moments", "_count")

    def __init__(self, executor: hpstage.InlineExecutor, moments: list[int]) -> None:
        super().__init__()
        self._executor, self._moments, self._count = executor, moments, Counter[str]()

    def __deepcopy__(self, memo: object) -> Counted:
        return Counted.sharing(self)

    @classmethod
    def sharing(cls, other: Counted) -> Counted:
        twin = cls(other._executor, other._moments)
        twin._count = other._count
        return twin

    @property
    def count(self) -> int:
        return self._count["steps"]

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        super().train(step, hp)
        self._count["steps"] += 1
        if self.count in self._moments:
            self._executor.wake()


@given(trials=searches(), every=st.integers(1, 15), seed=st.integers(0, 2**20))
@settings(max_examples=5)
def test_stopped_training_trains_each_step_once_and_gives_the_metrics_of_unstopped_training(trials, every, seed):
    moments = sorted(random.Random(seed).sample(range(1, 40), 4))
    executor = hpstage.InlineExecutor()
    tape = Counted(executor, moments)
    with TemporaryDirectory() as folder:
        executor.open(tape, FolderCheckpoints(Path(folder), WORKLOAD))
        journal = MemoryJournal()
        plan = open_plan(journal, WORKLOAD, {})
        driver = Driver(plan, Scheduler(plan, checkpoint_every=every), executor, journal)
        driver.add(trials)
        for added in trials:
            driver.ask(added.trial, added.steps)
        answers: list[Answer] = []
        while len(answers) < len(trials):
            answers += driver.wait(0.0)
            if moments and tape.count >= moments[0]:
                assert tape.count == moments.pop(0)
                before = tape.count
                driver.finish()
                assert tape.count == before, "it stopped where it was"
        executor.close()
    assert tape.count == plan.totals.steps_trained == len(histories(trials, stops_of(trials)))
    for answer in answers:
        added = next(added for added in trials if added.trial == answer.trial)
        assert answer.metrics == alone(added.schedules, answer.step).evaluate()
    for number, added in enumerate(trials):
        assert set(range(every, added.steps + 1, every)) <= set(kept_at(plan, number))


def test_training_saves_every_step_if_checkpoint_seconds_are_shorter_than_a_step(tmp_path: Path) -> None:
    executor = hpstage.InlineExecutor()
    executor.open(Tape(), FolderCheckpoints(tmp_path, WORKLOAD))
    journal = MemoryJournal()
    plan = open_plan(journal, WORKLOAD, {})
    driver = Driver(plan, Scheduler(plan, checkpoint_seconds=1e-9), executor, journal)
    driver.add([trial(0, {"lr": s.multistep(0.1, [3, 6])}, 10)])
    driver.ask("study/0", 10)
    while not driver.wait(0.0):
        continue
    assert kept_at(plan, 0) == list(range(1, 11))
    executor.close()


def test_a_training_function_reports_metrics_for_the_state_saved_at_a_stop(tmp_path: Path) -> None:
    """A saved state holds its metrics, which the function reports on request: for that it takes one more step."""
    executor = hpstage.InlineExecutor()
    steps: list[int] = []

    class Nothing:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: object) -> None:
            assert state == {}

    def train(run: hpstage.Run) -> None:
        run.attach(nothing=Nothing())
        for step in run.steps():
            steps.append(step)
            if step == 6:
                executor.wake()
            if run.wants_report:
                run.report(score=float(step))

    executor.open(train, FolderCheckpoints(tmp_path, WORKLOAD))
    journal = MemoryJournal()
    plan = open_plan(journal, WORKLOAD, {})
    driver = Driver(plan, Scheduler(plan, checkpoint_every=100), executor, journal)
    driver.add([trial(0, {"lr": s.multistep(0.1, [4])}, 20)])
    driver.ask("study/0", 20)
    while 6 not in steps:
        assert driver.wait(0.0) == []
    driver.finish()
    assert steps == list(range(8))
    driver.ask("study/0", 8)
    answers: list[Answer] = []
    while len(answers) < 2:
        answers += driver.wait(0.0)
    assert steps == list(range(20)), "nothing was trained again"
    executor.close()


# --- what follows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("horizons", [(100, 200, 400, 800), (800, 400, 200, 100)], ids=["longer", "shorter"])
def test_wsd_horizons_as_consecutive_studies_train_only_unique_steps(horizons: tuple[int, ...], tmp_path: Path) -> None:
    journal = MemoryJournal()
    for horizon in horizons:
        result = hpstage.optimize(
            optuna.create_study(study_name=f"to {horizon}"),
            Tape(),
            lambda _, horizon=horizon: {"lr": s.wsd(0.1, horizon, warmup=5, decay=horizon // 10)},
            metric="score",
            steps=horizon,
            n_trials=1,
            executor=hpstage.InlineExecutor(),
            store=journal,
            checkpoints=tmp_path,
            checkpoint_every=1,
        )
    assert merged(result.plan).steps_unique == 867
    assert result.plan.totals.steps_trained == 867


def test_no_amendment_is_sent_for_states_that_a_chain_saves_at_its_interval() -> None:
    executor = SimulatedExecutor(1)
    sent: list[object] = []
    executor.amend = sent.append  # type: ignore[method-assign]
    search = Search(executor, checkpoint_every=1)
    search.run([trial(0, {"lr": s.multistep(0.1, [100, 200])}, 300)], [300])
    assert not sent
    assert len([fact for fact in search_facts(search) if fact.kept is not None]) == 300


def search_facts(search: Search) -> list[StateReached]:
    from hpstage.plan.log import read_facts

    return [fact for fact in read_facts(search.journal) if isinstance(fact, StateReached)]
