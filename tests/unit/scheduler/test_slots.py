"""Chains are trained side by side by a worker where that pays, and where more of them are ready than workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpstage import schedule as s
from hpstage.accounting.book import open_book
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.execution.simulated_cluster import SimulatedCluster
from hpstage.plan.facts import (
    ChainClosed,
    ChainId,
    ChainStarted,
    Fact,
    Kept,
    Span,
    StateReached,
    StepsTimed,
    TargetAsked,
    TrialAdded,
    TrialId,
    WorkerId,
)
from hpstage.plan.log import open_plan, read_facts
from hpstage.plan.messages import WorkerJoined, WorkerLeft, host_of, names_of
from hpstage.plan.plan import SearchPlan
from hpstage.plan.step_times import ALONE, StepTimes
from hpstage.scheduler.scheduler import Scheduler
from hpstage.store.memory import MemoryJournal
from tests.invariants import validate_scheduler
from tests.unit.searches import WORKLOAD, Search, searches, trial

TIMES = StepTimes(((1, 1.0), (2, 1.25), (4, 2.0), (8, 8.0)))
"""Of 8, each takes as long as alone: 4 are best."""
TABLES = [TIMES, ALONE, StepTimes(((1, 1.0), (2, 1.1), (4, 1.2), (8, 1.3)))]


def fused(workers: int, **options: float) -> Search:
    """A search whose workers have 8 slots."""
    executor = SimulatedExecutor(SimulatedCluster(workers, slots=8), step_times=TIMES, **options)  # type: ignore[arg-type]
    found = Search(executor)
    found.driver.log.write([StepsTimed(TIMES.seconds, 0.0)])
    return found


def constants(count: int, steps: int = 10) -> list[TrialAdded]:
    return [trial(number, {"a": s.constant(number)}, steps) for number in range(count)]


def loads(facts: Iterable[Fact]) -> list[tuple[WorkerId, Counter[WorkerId]]]:
    """The worker of each chain, and how many chains each worker has by then, this one included."""
    on: dict[ChainId, WorkerId] = {}
    found = []
    for fact in facts:
        if isinstance(fact, ChainStarted):
            on[fact.chain] = host_of(fact.worker)
            found.append((host_of(fact.worker), Counter(on.values())))
        elif isinstance(fact, ChainClosed):
            on.pop(fact.chain, None)
    return found


def test_a_worker_trains_as_many_chains_at_once_as_is_fastest() -> None:
    run = fused(2)
    run.run(constants(16), [10] * 16)
    assert max(max(chains.values()) for _, chains in loads(read_facts(run.journal))) == 4
    # Two rounds of four on each worker, whose steps take 2 s.
    assert run.executor.clock() == pytest.approx(2 * 10 * 2.0)
    assert run.plan.totals.train_seconds == pytest.approx(2 * 2 * 10 * 2.0)
    assert run.plan.totals.own_seconds == pytest.approx(16 * 10 * 1.0)


@settings(max_examples=20)
@given(searches(), st.integers(1, 3), st.data())
def test_no_two_chains_share_a_worker_while_another_worker_is_idle(
    trials: list[TrialAdded], workers: int, data: st.DataObject
) -> None:
    run = fused(workers, load_seconds=0.5, save_seconds=0.25)
    run.run(trials, [data.draw(st.integers(1, added.steps)) for added in trials])
    for host, chains in loads(read_facts(run.journal)):
        assert chains[host] <= 4
        assert chains[host] == 1 or len(chains) == workers


@settings(max_examples=20)
@given(searches(), st.integers(1, 2), st.data())
def test_chains_that_share_a_worker_divide_its_seconds_and_report_their_own_seconds(
    trials: list[TrialAdded], workers: int, data: st.DataObject
) -> None:
    run = fused(workers, step_seconds=3.0)
    run.run(trials, [data.draw(st.integers(1, added.steps)) for added in trials])
    for fact in read_facts(run.journal):
        if isinstance(fact, StateReached):
            assert fact.own_seconds == pytest.approx(3.0 * (fact.step - fact.start))
            assert fact.train_seconds <= fact.own_seconds * (1 + 1e-9)
    totals = run.plan.totals
    assert totals.average_step_seconds == pytest.approx(3.0)
    assert totals.train_seconds <= workers * run.executor.clock() * (1 + 1e-9)
    saved = open_book(run.journal).savings
    assert (
        saved.fused_seconds == pytest.approx(totals.own_seconds - totals.train_seconds, abs=1e-3)
        and saved.exchange_seconds == 0.0
    )
    assert saved.worker_seconds_alone >= saved.worker_seconds - 1e-3
    assert saved.workers <= workers


@settings(max_examples=20)
@given(searches(), st.integers(1, 3), st.sampled_from(TABLES))
def test_no_more_chains_share_a_worker_than_its_measured_step_times_allow(
    trials: list[TrialAdded], workers: int, table: StepTimes
) -> None:
    executor = SimulatedExecutor(SimulatedCluster(workers, slots=8), step_times=table)
    run = Search(executor)
    run.run(trials, [added.steps for added in trials])
    plan = SearchPlan(WORKLOAD)
    running: dict[ChainId, WorkerId] = {}
    for fact in read_facts(run.journal):
        if isinstance(fact, ChainStarted):
            running[fact.chain] = host_of(fact.worker)
            assert Counter(running.values())[host_of(fact.worker)] <= (plan.step_times or ALONE).allowed(8)
        elif isinstance(fact, ChainClosed):
            del running[fact.chain]
        plan.apply(fact)
    assert plan.step_times == table.up_to(8) == run.scheduler.workers.step_times


def test_a_worker_gives_up_a_chain_if_two_chains_at_once_are_not_faster() -> None:
    """The others are for workers that are free, or wait; their steps are not trained again."""
    run = Search(SimulatedExecutor(SimulatedCluster(1, slots=8), step_times=ALONE))
    run.run(constants(2), [10] * 2)
    facts = [*read_facts(run.journal)]
    assert [chains["sim-0"] for _, chains in loads(facts)] == [1, 2, 1]
    reached = [(fact.at, fact.step) for fact in facts if isinstance(fact, StateReached)]
    assert reached == [(10.0, 10), (20.0, 10)]


def test_remaining_work_counts_a_chain_that_shares_a_worker_as_slower() -> None:
    run = fused(1)
    trials = [trial(number, {"a": s.constant(number)}, steps) for number, steps in enumerate([100, 200])]
    run.driver.add(trials)
    for added in trials:
        run.driver.ask(added.trial, added.steps)
    run.driver.wait(0.0)
    assert run.scheduler.workers.strength() == pytest.approx(4 / 2.0)
    assert run.scheduler.remaining_work(0.0).work_seconds == pytest.approx(300)
    assert run.scheduler.remaining_work(50.0).work_seconds == pytest.approx(300 - 2 * 50 / 1.25)
    assert run.scheduler.remaining_work(50.0).steps_since == 0  # what a step takes is not known
    run.answers(2)
    assert run.executor.clock() == pytest.approx(100 * 1.25 + 100)


class Turns:
    """A scheduler on hosts of three slots each, taken turn by turn."""

    def __init__(self, *, widest: int = 1) -> None:
        self.plan = open_plan(MemoryJournal(), WORKLOAD, {})
        self.scheduler = Scheduler(self.plan, checkpoint_every=10**9, widest=widest)
        self.scheduler.fold(StepsTimed(((1, 1.0), (3, 1.5)), 0.0))

    def ask(self, number: int, steps: int) -> None:
        self.scheduler.fold(TrialAdded(TrialId(f"t/{number}"), {"a": s.constant(number)}, steps))
        self.scheduler.fold(TargetAsked(TrialId(f"t/{number}"), steps))

    def started(self) -> list[ChainStarted]:
        claims = self.scheduler.propose()
        for claim in claims:
            self.scheduler.fold(claim)
        return [claim for claim in claims if isinstance(claim, ChainStarted)]

    def join(self, *hosts: str) -> list[ChainStarted]:
        for host in hosts:
            for slot in names_of(WorkerId(host), 3):
                self.scheduler.note(WorkerJoined(slot, 0.0))
        return self.started()

    def die(self, host: str) -> None:
        for slot in names_of(WorkerId(host), 3):
            left = WorkerLeft(slot, 2.0)
            for fact in self.scheduler.decide(left):
                self.scheduler.fold(fact)
            self.scheduler.note(left)

    def reach(self, chain: ChainStarted, step: int) -> None:
        node = self.plan.nodes[chain.spans[0].node]
        kept = Kept(self.plan.key(node, step), 1, "digest")
        metrics = {"v": 1.0}
        self.scheduler.fold(
            StateReached(chain.chain, chain.worker, node.id, 0, step, 1.0, 1.0, metrics=metrics, kept=kept)
        )


def test_a_suspect_chain_gets_a_whole_worker_even_if_other_chains_keep_filling_slots() -> None:
    """It trains without others, so that a worker must be free of them for once."""
    turns = Turns()
    for number in range(1, 4):
        turns.ask(number, 8)
    others = turns.join("b")
    turns.ask(0, 100)
    [suspect] = turns.join("a")
    assert [host_of(chain.worker) for chain in (*others, suspect)] == ["b", "b", "b", "a"]
    turns.reach(suspect, 5)
    turns.die("a")
    for number, chain in enumerate(others, 4):
        assert turns.started() == []
        turns.ask(number, 8)  # further ones are always ready
        turns.reach(chain, 8)
        turns.scheduler.fold(ChainClosed(chain.chain, 3.0))
    [again] = turns.started()
    assert again.spans[0] == Span(suspect.spans[0].node, 5, 100)
    assert turns.started() == []  # nothing is put next to it
    validate_scheduler(turns.scheduler)


def test_other_branches_at_the_step_of_a_suspect_chain_still_share_workers() -> None:
    turns = Turns()
    turns.ask(0, 100)
    turns.join("a")
    turns.die("a")
    for number in range(1, 4):
        turns.ask(number, 8)
    suspect, *others = turns.join("b", "c")
    assert suspect.spans[0].stop == 100 and host_of(suspect.worker) == "b"
    assert [host_of(chain.worker) for chain in others] == ["c", "c", "c"]
    validate_scheduler(turns.scheduler)


def test_other_branches_at_the_step_of_a_suspect_chain_may_be_trained_by_a_gang() -> None:
    turns = Turns(widest=2)
    turns.ask(0, 100)
    turns.join("a")
    turns.die("a")
    turns.ask(1, 80)
    assert [len(chain.gang) for chain in turns.join("b", "c", "d")] == [0, 1]
    validate_scheduler(turns.scheduler)
