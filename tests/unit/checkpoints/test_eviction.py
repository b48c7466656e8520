"""Searches under a budget of checkpoints: the same results, and nothing that is needed ever goes."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import wait

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpstage import schedule as s
from hpstage.checkpoints.evictable import kept_states
from hpstage.checkpoints.eviction import Eviction
from hpstage.errors import CheckpointError, UsageError
from hpstage.errors.arguments import BYTES
from hpstage.execution.simulated import SimulatedExecutor, value_of_key
from hpstage.plan.facts import (
    ChainClosed,
    ChainId,
    ChainStarted,
    DriverId,
    Fact,
    Kept,
    NodeId,
    Part,
    Span,
    StateKey,
    StateLost,
    StateReached,
    TargetAsked,
    TrialAdded,
    TrialId,
    WorkerId,
)
from hpstage.plan.log import open_plan
from hpstage.plan.messages import BoundaryReached, Chain, ChainEnded, Report
from hpstage.plan.plan import SearchPlan
from hpstage.store.memory import MemoryJournal
from tests.invariants import validate, validate_scheduler
from tests.records import separated
from tests.unit.checkpoints.test_evictable import ended, proposed, started
from tests.unit.driver.test_several_drivers import Study
from tests.unit.driver.test_several_drivers import searches as wishes
from tests.unit.searches import WORKLOAD, Search, histories, trial


class Shelf:
    """The checkpoints of simulated workers."""

    def __init__(self, keys: set[StateKey] | None = None) -> None:
        self.keys: set[StateKey] = set() if keys is None else keys

    def delete(self, key: StateKey) -> None:
        self.keys.discard(key)


class Stuck(Shelf):
    """Nothing can be removed."""

    def delete(self, key: StateKey) -> None:
        raise CheckpointError("no permission")


class Log:
    """A plan and its journal, without a driver. ``concurrent`` are facts that others write before the next commit."""

    def __init__(self, plan: SearchPlan) -> None:
        self.plan = plan
        self.concurrent: list[Fact] = []
        self.commits = 0

    def commit(self, facts: Sequence[Fact]) -> bool:
        self.commits += 1
        before, self.concurrent = self.concurrent, []
        for fact in before or facts:
            self.plan.apply(fact)
        self.plan.cursor = self.plan.cursor.after([b""] * len(before or facts))
        return not before


def kept_line(count: int, every: int = 1, parts: tuple[Part, ...] = ()) -> Log:
    """A plan with one trial of ``count`` states kept along it, one byte and one second each."""
    plan = SearchPlan(WORKLOAD)
    plan.apply(trial(0, {"a": s.constant(1)}, count * every))
    log = Log(plan)
    for number in range(1, count + 1):
        reach(log, number * every, every, parts)
    return log


def reach(log: Log, step: int, steps: int = 1, parts: tuple[Part, ...] = ()) -> None:
    plan = log.plan
    node = plan.trials[TrialId("study/0")].node_at(step)
    key = plan.key(node, step)
    kept = Kept(key, 1, "", parts=parts)
    plan.apply(
        StateReached(ChainId("c"), WorkerId("w"), node.id, step - steps, step, float(step), 1.0 * steps, kept=kept)
    )
    plan.cursor = plan.cursor.after([b""])


def steps_kept(log: Log) -> list[int]:
    return sorted(state.step for state in log.plan.kept.values())


# --- laws -------------------------------------------------------------------------------------------------


class Watched(SimulatedExecutor):
    """Notes every chain whose source is gone when it is started."""

    missing = 0

    def start(self, worker: WorkerId, chain: Chain) -> None:
        self.missing += chain.source is not None and chain.source not in self.kept
        super().start(worker, chain)


@pytest.mark.ci
@given(st.lists(wishes(), min_size=1, max_size=3), st.integers(0, 6), st.integers(), st.integers(1, 3))
@settings(max_examples=20)
def test_a_tiny_checkpoint_budget_changes_no_metrics_and_no_worker_starts_from_an_evicted_state(
    wanted, budget, seed, batch
) -> None:
    choose = random.Random(seed)
    journal, shelf = MemoryJournal(), Shelf()
    studies = []
    for number in range(len(wanted)):
        # One that knows no budget among them; the first has one, and has the last word.
        eviction = Eviction(shelf, choose.choice([budget, None]) if number else budget, batch=batch)
        study = Study(f"s{number}", journal, shelf.keys, every=choose.choice([1, 2, 10**9]), eviction=eviction)
        study.executor.__class__ = Watched
        studies.append((study, eviction))
    for (study, _), (trials, stops) in zip(studies, wanted, strict=True):
        study.driver.log.write([started(study.name)])
        # In two parts, as an algorithm asks: first a rung, then on.
        study.ask(trials, [max(1, stop // 2) for stop in stops])
        study.driver.log.write([proposed(f"{study.name}/{i}", study.name) for i in range(len(trials))])
    promoted = set()
    for _ in range(3000):
        study, eviction = choose.choice(studies)
        if study.done and study.name not in promoted:
            promoted.add(study.name)
            for i, stop in enumerate(wanted[int(study.name[1:])][1]):
                study.driver.ask(TrialId(f"{study.name}/{i}"), stop)
                study.requests += 1
        elif len(promoted) == len(studies) and all(study.done for study, _ in studies):
            break
        study.turn()
        wait([removal.done for removal in eviction._removing.values()])  # so that the seed decides the order of all
    else:
        raise AssertionError("the drivers hang")
    for (study, _), (trials, _) in zip(studies, wanted, strict=True):
        study.driver.log.write([ended(f"{study.name}/{i}", study.name) for i in range(len(trials))])
    for study, _ in studies:
        for answer in study.answers:
            key = study.plan.key(study.plan.trials[answer.trial].node_at(answer.step), answer.step)
            assert answer.metrics == value_of_key(key, answer.step)
        assert study.executor.missing == 0
    for study, _ in studies:
        study.driver.finish()
    for study, eviction in reversed(studies):
        study.turn()
        eviction.settle(study.driver.log)
        eviction.close()
        validate_scheduler(study.scheduler)
    final = open_plan(journal, WORKLOAD, {})
    validate(final)
    assert set(final.kept) == shelf.keys, "what is kept is there, and nothing else"
    assert final.kept_bytes <= budget
    # Evicted states cost their training again; nothing else does.
    everything = [added for trials, _ in wanted for added in trials]
    stops = [stop for _, stops in wanted for stop in stops]
    lost = [record for record in separated(journal).read() if b'"StateLost"' in record]
    trained = final.totals.steps_trained
    assert trained >= len(histories(everything, stops))
    assert trained == len(histories(everything, stops)) or lost
    assert all(b"evicted" in record for record in lost)


@given(wishes(), st.integers(0, 5), st.integers(1, 3))
@settings(max_examples=15)
def test_every_eviction_keeps_all_needed_states(wanted, budget, workers) -> None:
    trials, stops = wanted

    class Watching(Eviction):
        def evict(self, log, to, reason):
            needed = {state.key for state in kept_states(log.plan) if state.needed}
            decision = super().evict(log, to, reason)
            assert needed <= log.plan.kept.keys()
            assert decision.remaining <= to or log.plan.kept.keys() == needed
            return decision

    shelf = Shelf()
    executor = SimulatedExecutor(workers, kept=shelf.keys, state_bytes=1)
    search = Search(executor, checkpoint_every=1)
    search.driver.eviction = Watching(shelf, budget)
    search.driver.log.write([started(), *(proposed(f"study/{i}") for i in range(len(trials)))])
    mine = [TrialAdded(TrialId(f"study/{i}"), added.schedules, added.steps) for i, added in enumerate(trials)]
    answers = search.run(mine, stops)
    assert len(answers) == len(trials)
    search.driver.eviction.close()


@pytest.mark.ci
@given(wishes(), st.integers(0, 8), st.integers(1, 3), st.sampled_from([1, 2]))
@settings(max_examples=40)
def test_every_published_checkpoint_fits_into_the_budget_unless_needed_states_exceed_it(
    wanted, budget, workers, every
) -> None:
    trials, _ = wanted

    class Disk(set):
        """Checks each checkpoint that is published, before the driver hears of it."""

        def add(self, key: StateKey) -> None:
            super().add(key)
            plan = search.driver.plan
            needed = {state.key for state in kept_states(plan) if state.needed}
            assert len(self) <= max(
                budget, len(needed | {key}) + sum(chain.continues for chain in plan.chains.values())
            )

    class Watching(Eviction):
        def enforce(self, log):
            super().enforce(log)
            wait([removal.done for removal in self._removing.values()])  # as a disk that is fast

    shelf = Shelf(Disk())
    executor = SimulatedExecutor(workers, kept=shelf.keys, state_bytes=1)
    search = Search(executor, checkpoint_every=every)
    search.driver.eviction = Watching(shelf, budget)
    search.driver.log.write([started(), *(proposed(f"study/{i}") for i in range(len(trials)))])
    mine = [TrialAdded(TrialId(f"study/{i}"), added.schedules, added.steps) for i, added in enumerate(trials)]
    search.driver.add(mine)
    for rung in (4, 8):  # the second continues the states of the first
        answers = 0
        for added in mine:
            search.driver.ask(added.trial, rung)
        while answers < len(mine):
            answers += len(search.driver.wait())
    search.driver.finish()
    search.driver.eviction.close()
    assert search.driver.plan.totals.steps_trained == len(histories(mine, [8] * len(mine))), "none twice"


# --- the protocol -----------------------------------------------------------------------------------------


def test_a_state_that_another_driver_starts_from_concurrently_is_not_evicted() -> None:
    log = kept_line(4)
    eviction = Eviction(Shelf(), 0)
    log.concurrent = [ChainStarted(ChainId("c"), DriverId("d"), WorkerId("w"), (Span(NodeId(0), 2, 3),), 9.0)]
    eviction.evict(log, 0, "evicted")
    eviction.close()
    assert log.commits == 2
    assert steps_kept(log) == [2, 3]  # where it starts, and what it comes to


class Interrupted(MemoryJournal):
    """Lets something happen just before the next append."""

    happens: Callable[[], None] | None = None

    def append(self, records, **options):
        happens, self.happens = self.happens, None
        if happens is not None:
            happens()
        return super().append(records, **options)


def two_studies() -> tuple[Interrupted, Shelf, Study, Study]:
    """Study "one" has kept the state of its trial at step 4, of 8."""
    journal, shelf = Interrupted(), Shelf()
    one, other = (Study(name, journal, shelf.keys, workers=1) for name in ("one", "other"))
    one.executor.__class__ = Watched
    one.ask([trial(0, {"a": s.constant(1)}, 8)], [4])
    while not one.done:
        one.turn()
    one.driver.finish()
    other.turn()
    assert len(one.plan.kept) == len(other.plan.kept) == 1
    return journal, shelf, one, other


def test_a_driver_evicts_nothing_before_it_has_read_all_records() -> None:
    journal, _, one, other = two_studies()
    one.driver.log.write([started("one")])
    length = len(journal)
    assert not other.driver.log.commit([StateLost(NodeId(0), 4, "evicted")])
    assert len(journal) == length and other.plan.kept and "one" in other.plan.searches
    assert other.driver.log.commit([StateLost(NodeId(0), 4, "evicted")])
    assert len(journal) == length + 1 and not other.plan.kept


def test_a_chain_is_not_started_from_a_state_that_another_driver_has_just_evicted() -> None:
    journal, shelf, one, other = two_studies()
    one.driver.ask(TrialId("one/0"), 8)
    one.requests += 1
    eviction = Eviction(shelf)

    def evict() -> None:
        eviction.evict(other.driver.log, 0, "evicted")
        eviction.finish(other.driver.log)

    journal.happens = evict
    while not one.done:
        one.turn()
    eviction.close()
    assert eviction.removed == 1 and one.executor.missing == 0
    assert one.plan.totals.steps_trained == 4 + 8  # from the beginning, and once


def test_two_drivers_may_record_the_loss_of_the_same_checkpoint() -> None:
    journal, _, one, other = two_studies()
    one.driver.log.write([StateLost(NodeId(0), 4, "unreadable", "missing")])
    other.driver.log.write([StateLost(NodeId(0), 4, "unreadable", "missing")])
    plan = open_plan(journal, WORKLOAD, {})
    assert not plan.kept and plan.kept_bytes == 0
    for study in (one, other):
        study.turn()


def test_a_checkpoint_is_removed_only_after_its_eviction_is_recorded() -> None:
    log = kept_line(3)
    order: list[str] = []

    class Noting(Shelf):
        def delete(self, key: StateKey) -> None:
            assert key not in log.plan.kept
            order.append(key)

    eviction = Eviction(Noting(), 1)
    eviction.settle(log)
    eviction.close()
    assert len(order) == 3 == eviction.removed and log.plan.kept_bytes == 0


def test_an_evicted_state_that_is_saved_again_before_its_removal_is_not_removed() -> None:
    log, shelf = kept_line(5), Shelf()
    shelf.keys = set(log.plan.kept)
    eviction = Eviction(shelf, 5, batch=1)
    eviction.evict(log, 0, "evicted")
    again = log.plan.nodes[0].states[4]
    reach(log, 4)
    eviction.finish(log)
    eviction.close()
    assert shelf.keys == {again.kept.key} and eviction.removed == 4


def test_an_evicted_state_ahead_of_a_running_chain_is_removed_only_when_the_chain_ends() -> None:
    log, shelf = kept_line(5), Shelf()
    shelf.keys = set(log.plan.kept)
    eviction = Eviction(shelf, 0)
    eviction.evict(log, 0, "evicted")
    log.plan.apply(ChainStarted(ChainId("c"), DriverId("d"), WorkerId("w"), (Span(NodeId(0), 0, 2),), 9.0))
    eviction.finish(log)
    assert len(shelf.keys) == 2
    log.plan.apply(ChainClosed(ChainId("c"), 10.0))
    eviction.finish(log)
    eviction.close()
    assert not shelf.keys


def test_a_failed_removal_of_a_checkpoint_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = kept_line(2)
    eviction = Eviction(Stuck(), 0)
    with caplog.at_level(logging.WARNING, "hpstage"):
        eviction.settle(log)
    eviction.close()
    assert eviction.failed == 2 and eviction.removed == 0 and not log.plan.kept
    assert "no permission" in caplog.text and "hpstage gc" in caplog.text


def test_needed_states_that_exceed_the_budget_are_kept_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log = kept_line(3)
    log.plan.apply(started())
    log.plan.apply(proposed("study/0"))
    log.plan.apply(TargetAsked(TrialId("study/0"), 3))
    eviction = Eviction(Shelf(), 0)
    with caplog.at_level(logging.WARNING, "hpstage"):
        eviction.settle(log)
        eviction.settle(log)
    eviction.close()
    assert steps_kept(log) == [3] and len(caplog.records) == 1
    assert "still needed take 1 bytes" in caplog.text


def test_no_state_is_evicted_without_a_checkpoint_budget() -> None:
    log = kept_line(3)
    eviction = Eviction(Shelf())
    eviction.settle(log)
    assert steps_kept(log) == [1, 2, 3]


# --- a full disk ------------------------------------------------------------------------------------------


class Full(SimulatedExecutor):
    """Workers on a disk with room for so many checkpoints."""

    def __init__(self, room: int, kept: set[StateKey]) -> None:
        super().__init__(2, kept=kept, state_bytes=1)
        self.room = room
        self.over: set[ChainId] = set()

    def wait(self, timeout: float | None) -> list[Report]:
        reports: list[Report] = []
        for report in super().wait(timeout):
            payload = report.reached if isinstance(report, BoundaryReached) else report
            chain = getattr(payload, "chain", None)
            if chain in self.over:
                continue
            kept = getattr(payload, "kept", None)
            if kept is not None and len(self.kept) > self.room:
                self.kept.discard(kept.key)
                self.over.add(chain)
                if chain in self._flights:
                    self._land(self._flights[chain])
                reports.append(ChainEnded(chain, payload.worker, "full", self.clock(), message="no space left"))
            else:
                reports.append(report)
        return reports


def search_on_full_disk(room: int, stops: Sequence[int], *, evicting: bool = True) -> Search:
    shelf = Shelf()
    search = Search(Full(room, shelf.keys), checkpoint_every=1)
    if evicting:
        search.driver.eviction = Eviction(shelf)
    trials = [trial(i, {"a": s.piecewise({0: 1, 4: 1 + i})}, 8) for i in range(len(stops))]
    answers = search.run(trials, stops)
    for answer in answers:
        key = search.plan.key(search.plan.trials[answer.trial].node_at(answer.step), answer.step)
        assert answer.metrics == value_of_key(key, answer.step)
    return search


def test_states_that_are_not_needed_are_evicted_on_a_full_disk_and_the_search_continues() -> None:
    search = search_on_full_disk(4, [8, 8, 8])
    assert any(b"disk is full" in record for record in search.journal.read())


def test_a_full_disk_with_nothing_to_evict_ends_the_search() -> None:
    with pytest.raises(CheckpointError, match="no space left"):
        search_on_full_disk(0, [8])
    with pytest.raises(CheckpointError, match="no space left"):
        search_on_full_disk(3, [8, 8, 8])  # the trunk, for the third, and where the two that run would start again
    with pytest.raises(CheckpointError, match="no space left"):
        search_on_full_disk(4, [8, 8, 8], evicting=False)


def test_a_full_disk_in_a_chain_that_ran_during_an_eviction_causes_no_further_eviction() -> None:
    log, shelf = kept_line(4), Shelf()
    log.plan.apply(ChainStarted(ChainId("two"), DriverId("d"), WorkerId("w"), (Span(NodeId(0), 4, 5),), 9.0))
    eviction = Eviction(shelf)
    assert eviction.make_room(log, [ChainId("one")])
    left = steps_kept(log)
    assert len(left) == 2
    assert eviction.make_room(log, [ChainId("two")]) and steps_kept(log) == left
    assert eviction.make_room(log, [ChainId("three")]) and len(steps_kept(log)) == 1
    assert not eviction.make_room(log, [ChainId("four")]), "the last is where a chain starts"
    eviction.close()


# --- cost -------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_eviction_runs_once_each_time_checkpoints_grow_by_a_tenth_of_the_budget() -> None:
    plan = SearchPlan(WORKLOAD)
    plan.apply(trial(0, {"a": s.constant(1)}, 10_000))
    log, eviction = Log(plan), Eviction(Shelf(), 5_000)
    for step in range(1, 10_001):
        reach(log, step)
        eviction.enforce(log)
    eviction.finish(log)
    eviction.close()
    assert plan.kept_bytes <= 5_000 and eviction.removed >= 5_000
    assert log.commits <= 11


@pytest.mark.ci
def test_eviction_is_not_tried_at_every_saved_state_while_needed_states_exceed_the_budget() -> None:
    plan = SearchPlan(WORKLOAD)
    plan.apply(started())
    log, looked = Log(plan), 0

    class Counting(Eviction):
        def evict(self, log, budget, reason):
            nonlocal looked
            looked += 1
            return super().evict(log, budget, reason)

    eviction = Counting(Shelf(), 10)
    for number in range(3_000):  # each trial stands at its own state, and none is over
        id = TrialId(f"study/{number}")
        plan.apply(TrialAdded(id, {"a": s.constant(number)}, 2))
        plan.apply(proposed(id))
        plan.apply(TargetAsked(id, 1))
        node = plan.trials[id].last.ancestry()[0]
        kept = Kept(plan.key(node, 1), 1, "")
        plan.apply(
            StateReached(ChainId("c"), WorkerId("w"), node.id, 0, 1, 0.0, 1.0, metrics={"value": 0.0}, kept=kept)
        )
        plan.cursor = plan.cursor.after([b""] * 4)
        eviction.enforce(log)
    assert len(plan.kept) == 3_000 and looked < 200


# --- sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "found"), [(0, 0), (17, 17), ("17", 17), ("20 GB", 20 * 10**9), ("1.5MiB", 3 << 19), (" 5 kB ", 5000)]
)
def test_a_checkpoint_budget_is_a_number_of_bytes_or_a_text_with_a_unit(size: int | str, found: int) -> None:
    assert BYTES.of("checkpoint_budget", size) == found


@pytest.mark.parametrize("size", [-1, "-1", "", "GB", "20 quux", "nan", "1e999", True, 2.5, None, b"5"])
def test_an_invalid_checkpoint_budget_is_refused(size: object) -> None:
    with pytest.raises(UsageError, match=r"checkpoint_budget is .*'20 GB'"):
        BYTES.of("checkpoint_budget", size)
