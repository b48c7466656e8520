"""Audits: what idle workers train again, when they give way, and what follows from it. On virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import pytest

from hpstage import schedule as s
from hpstage.errors import StateError
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import Audited, SearchStarted, StateDiffers, StateKey, TrialAdded, TrialEnded, TrialId, WorkerId
from hpstage.plan.log import open_plan, read_facts
from hpstage.plan.messages import Audit, AuditId, Chain, Report
from hpstage.plan.plan import SearchPlan
from hpstage.plan.snapshot import restored, snapshot_of
from hpstage.scheduler.answers import Answer
from hpstage.scheduler.audit_draw import UNSEEN, AuditDraw, Drawn
from hpstage.store.memory import MemoryJournal
from tests.simulated_audits import AuditingExecutor
from tests.unit.searches import WORKLOAD, Search, trial


class Recording(AuditingExecutor):
    """Notes what is started and audited, in order."""

    def __init__(self, workers: int, **options: object) -> None:
        super().__init__(workers, **{"audit_seconds": 0.0, **options})  # type: ignore[arg-type]
        self.started: list[tuple[float, WorkerId]] = []
        self.audited: list[tuple[float, WorkerId, Audit]] = []
        self.ended: list[tuple[float, AuditId]] = []

    def start(self, worker: WorkerId, chain: Chain) -> None:
        super().start(worker, chain)
        self.started.append((self.clock(), worker))

    def audit(self, worker: WorkerId, audit: Audit) -> None:
        super().audit(worker, audit)
        self.audited.append((self.clock(), worker, audit))

    def stop_audit(self, audit: AuditId) -> None:
        super().stop_audit(audit)
        self.ended.append((self.clock(), audit))


def lopsided(long: int = 40, short: int = 8) -> list[TrialAdded]:
    """Two branches, one of which takes longer than the other: a worker of two will be idle."""
    return [trial(0, {"a": s.constant(1)}, long), trial(1, {"a": s.constant(2)}, short)]


def run(executor: SimulatedExecutor, trials: list[TrialAdded], **options: object) -> Search:
    search = Search(executor, audit=True, checkpoint_every=4, **options)
    search.run(trials, [one.steps for one in trials])
    return search


def audits_of(search: Search) -> list[Audited]:
    return [fact for fact in read_facts(search.journal) if isinstance(fact, Audited)]


def test_an_idle_worker_retrains_a_segment_between_two_saved_states() -> None:
    executor = Recording(2)
    search = run(executor, lopsided())
    assert executor.audited
    for _, worker, audit in executor.audited:
        assert worker == "sim-1", "the other one trains"
        segment = audit.segment
        [goal] = segment.compared
        last = segment.stages[-1]
        assert segment.stop == last.stop == goal.step
        known = search.plan.nodes[last.node].state(goal.step)
        assert known is not None and known.digest == goal.digest
        if segment.source is None:
            assert segment.start == 0
        else:
            source = search.plan.kept[segment.source]
            assert (source.step, source.node.id) == (segment.start, last.node)
            between = [step for step in source.node.states if segment.start < step < goal.step]
            assert not between
    found = audits_of(search)
    assert {fact.outcome for fact in found} <= {"equal", "stopped"}
    assert {(fact.node, fact.step) for fact in found if fact.outcome == "equal"} == {
        (ref.node, ref.step) for ref in search.plan.audited
    }


def test_a_worker_audits_only_after_it_was_idle_for_the_time_that_an_audit_takes_to_start() -> None:
    """The second worker is idle from 8 s on; before any was measured, an audit is taken to begin within 1.5 s."""
    executor = Recording(2, step_seconds=lambda hp: 0.1)
    run(executor, lopsided(400, 80))
    first, _, _ = executor.audited[0]
    assert 9.5 <= first < 10


def test_no_state_is_audited_twice() -> None:
    search = run(Recording(2), lopsided(200, 8))
    equal = [(fact.node, fact.step) for fact in audits_of(search) if fact.of == "segment" and fact.outcome == "equal"]
    assert len(equal) == len(set(equal)) > 8


def test_chains_start_at_the_same_times_with_and_without_audits() -> None:
    """The third trial becomes known while an audit runs that would take much longer."""

    def makespan(audit: bool) -> tuple[float, list[tuple[float, WorkerId]]]:
        executor = Recording(2, step_seconds=lambda hp: 1.0, audit_seconds=1000.0)
        search = Search(executor, audit=audit, checkpoint_every=4)
        first = lopsided()
        search.driver.add(first)
        for one in first:
            search.driver.ask(one.trial, one.steps)
        answers = []
        while not answers:
            answers += search.driver.wait()
        for _ in range(4):
            answers += search.driver.wait()
        late = trial(2, {"a": s.constant(3)}, 8)
        search.driver.add([late])
        search.driver.ask(late.trial, 8)
        while len(answers) < 3:
            answers += search.driver.wait()
        search.driver.finish()
        return executor.trained[-1].stop, executor.started

    assert makespan(audit=True) == makespan(audit=False)


def test_an_audit_is_stopped_before_a_chain_starts_on_its_worker() -> None:
    executor = Recording(2, audit_seconds=1000.0)
    search = Search(executor, audit=True, checkpoint_every=4)
    first = lopsided()
    search.driver.add(first)
    for one in first:
        search.driver.ask(one.trial, one.steps)
    while not executor.audited:
        search.driver.wait()
    late = trial(2, {"a": s.constant(3)}, 8)
    search.driver.add([late])
    search.driver.ask(late.trial, 8)
    search.driver.wait(0.0)
    [(_, worker, audit)] = executor.audited
    assert executor.ended == [(executor.clock(), audit.id)]
    assert executor.started[-1] == (executor.clock(), worker)
    search.driver.wait(0.0)
    [stopped] = audits_of(search)
    assert (stopped.outcome, stopped.compared) == ("stopped", 0)


def test_no_audit_is_due_if_nothing_was_trained_or_no_worker_is_idle() -> None:
    """Else the driver would look again at once, and again."""
    executor = Recording(2)
    search = Search(executor, audit=True, checkpoint_every=4)
    for _ in range(2):
        search.driver.wait(0.0)
    assert search.scheduler.audit_due_at() is None, "nothing was trained"
    trials = [trial(i, {"a": s.constant(1 + i)}, 8) for i in range(6)]
    search.driver.add(trials)
    for one in trials:
        search.driver.ask(one.trial, 8)
    answers: list[Answer] = []
    while not answers:
        assert search.scheduler.audit_due_at() is None, "both workers train"
        answers += search.driver.wait()
    search.answers(6 - len(answers))


def test_audits_do_not_count_in_the_totals_of_a_search() -> None:
    with_audits, without = run(Recording(2), lopsided()), Search(SimulatedExecutor(2), checkpoint_every=4)
    without.run(lopsided(), [40, 8])
    assert any(fact.seconds for fact in audits_of(with_audits))
    assert with_audits.plan.totals == without.plan.totals
    assert with_audits.driver.accounting.whole() == without.driver.accounting.whole()


def test_an_audit_that_finds_a_difference_ends_the_search_and_later_calls() -> None:
    trials = lopsided()
    plan = SearchPlan(WORKLOAD)
    for one in trials:
        plan.apply(one)
    bad = plan.key(plan.trials[TrialId("study/1")].node_at(8), 8)
    executor = Recording(2, inexact={bad})
    search = Search(executor, audit=True, checkpoint_every=4)
    search.driver.add(trials)
    for one in trials:
        search.driver.ask(one.trial, one.steps)
    with pytest.raises(StateError, match=r"the state after step 8 .* First trained from step 4 .* now from the check"):
        search.answers(3)
    facts = list(read_facts(search.journal))
    [differs] = [fact for fact in facts if isinstance(fact, StateDiffers)]
    assert (differs.step, differs.worker) == (8, "sim-1")
    assert [fact.outcome for fact in facts if isinstance(fact, Audited)][-1] == "differs"
    with pytest.raises(StateError, match="an earlier call"):
        Search(SimulatedExecutor(1), search.journal).driver.wait()


def test_an_executor_that_cannot_audit_gets_no_audits() -> None:
    executor = Recording(2, audit_seconds=None)
    search = Search(executor, audit=executor.can_audit, checkpoint_every=4)
    search.run(lopsided(), [40, 8])
    assert not executor.audited


# --- the rest, after the last stage ---------------------------------------------------------------------------


def two_regimes() -> list[TrialAdded]:
    return [trial(0, {"a": s.constant(0.5)}, 8), trial(1, {"a": s.constant(2)}, 8)]


def test_each_unaudited_regime_is_audited_once_after_the_last_stage() -> None:
    executor = Recording(2, audit_seconds=1.0)
    search = run(executor, two_regimes())
    assert not executor.audited, "no worker was idle"
    search.driver.audit_rest(100.0, lambda: True)
    regimes = Counter(search.plan.nodes[audit.segment.stages[-1].node].regime for _, _, audit in executor.audited)
    assert sorted(regimes.values()) == [1, 1]
    assert all(fact.waited == fact.seconds > 0 for fact in audits_of(search))


def test_an_audit_longer_than_the_budget_is_not_started() -> None:
    executor = Recording(2)
    search = run(executor, two_regimes())
    search.driver.audit_rest(3.0, lambda: True)  # 4 steps of a second
    assert not executor.audited


def test_a_short_segment_is_audited_even_if_longer_segments_exceed_the_budget() -> None:
    executor = Recording(1)
    search = Search(executor, audit=True, checkpoint_every=30)
    trials = [trial(i, {"a": s.piecewise({0: 2, 30: 3, 32: 4 + i})}, 62) for i in range(2)]
    search.run(trials, [62, 62])
    assert not executor.audited
    search.driver.audit_rest(4.0, lambda: True)
    assert [audit.segment.stop - audit.segment.start for _, _, audit in executor.audited] == [2]


def test_a_worker_gets_no_new_audit_before_its_stopped_audit_has_ended() -> None:
    executor = Recording(2, audit_seconds=1000.0)
    search = Search(executor, audit=True, checkpoint_every=4)
    trials = lopsided()
    search.driver.add(trials)
    for one in trials:
        search.driver.ask(one.trial, one.steps)
    while not executor.audited:
        search.driver.wait()
    audits = search.scheduler.audits
    assert audits is not None
    [ended] = audits.stop_all()
    assert search.scheduler.audit(executor.clock() + 10.0) == []
    executor.stop_audit(ended.audit)
    search.driver.wait(0.0)
    assert [fact.outcome for fact in audits_of(search)] == ["stopped"]


def test_an_audit_that_takes_longer_than_expected_is_stopped_when_the_budget_is_spent() -> None:
    class Waiting(Recording):
        def wait(self, timeout: float | None) -> list[Report]:
            """Let time pass as real executors do, where nothing happens."""
            if timeout and timeout <= 0.2:
                self.cluster.now += timeout
                return super().wait(0.0)
            return super().wait(timeout)

    executor = Waiting(2, audit_seconds=1000.0)
    search = run(executor, two_regimes())
    before = executor.clock()
    search.driver.audit_rest(20.0, lambda: True)
    assert len(executor.ended) == 2
    assert executor.clock() - before == pytest.approx(20.0, abs=0.21)


def test_no_audit_starts_after_the_last_stage_without_a_budget_or_after_an_interrupt() -> None:
    executor = Recording(2)
    search = run(executor, two_regimes())
    search.driver.audit_rest(0.0, lambda: True)
    search.driver.audit_rest(100.0, lambda: False)
    assert not executor.audited


# --- what is drawn ----------------------------------------------------------------------------------------------


def drawn_from(plan: SearchPlan, seed: str) -> list[Drawn]:
    draw = AuditDraw(plan, seed)
    found = []
    while (one := draw.next()) is not None:
        found.append(one)
    return found


def trained(trials: Iterable[TrialAdded]) -> SearchPlan:
    search = Search(SimulatedExecutor(1), checkpoint_every=4)
    trials = list(trials)
    search.run(trials, [one.steps for one in trials])
    return search.plan


def test_the_seed_decides_the_order_in_which_all_states_are_drawn_for_audits() -> None:
    plan = trained(lopsided())
    first, again, other = drawn_from(plan, "1"), drawn_from(plan, "1"), drawn_from(plan, "2")
    assert [one.ref for one in first] == [one.ref for one in again] != [one.ref for one in other]
    assert {one.ref for one in first} == {one.ref for one in other} == {state.ref for state in plan.kept.values()}


def test_the_chance_that_a_state_is_drawn_first_for_an_audit_is_proportional_to_its_step() -> None:
    plan = trained([trial(0, {"a": s.constant(1)}, 40)])
    first = Counter(drawn_from(plan, f"{seed}")[0].step for seed in range(2000))
    total = sum(range(4, 41, 4))
    for step in range(4, 41, 4):
        assert first[step] == pytest.approx(2000 * step / total, abs=4 * (2000 * step / total) ** 0.5)


def test_states_of_unaudited_regimes_are_drawn_more_often_than_states_of_audited_regimes() -> None:
    plan = trained(two_regimes())
    second = Counter()
    for seed in range(2000):
        one, two, *_ = drawn_from(plan, f"{seed}")
        second[one.node != two.node] += 1
    # Of each branch, states at steps 4 and 8. The one that is left of the same regime weighs a quarter.
    first_is_late = 8 / 12
    expected = first_is_late * 12 / (12 + 4 / UNSEEN) + (1 - first_is_late) * 12 / (12 + 8 / UNSEEN)
    assert second[True] / 2000 == pytest.approx(expected, abs=0.04)


def test_a_resumed_search_draws_only_unaudited_states_for_audits() -> None:
    journal = MemoryJournal()
    search = Search(Recording(2), journal, audit=True, checkpoint_every=4)
    search.run(lopsided(), [40, 8])
    assert search.plan.audited
    left = {one.ref for one in drawn_from(open_plan(journal, WORKLOAD, {}), "1")}
    assert left == {state.ref for state in search.plan.kept.values()} - search.plan.audited


def test_a_snapshot_of_a_plan_holds_its_audited_states() -> None:
    search = run(Recording(2), lopsided())
    again = restored(snapshot_of(search.plan), WORKLOAD, sharing=True)
    assert again.audited == search.plan.audited


def test_every_eighth_audit_trains_a_whole_trial_again_and_compares_all_its_saved_states() -> None:
    parting = [trial(i, {"a": s.piecewise({0: 1, 8: i + 1})}, 40) for i in range(2)]
    search = Search(Recording(1), checkpoint_every=4)
    search.run(parting, [40, 40])
    search.driver.log.write([SearchStarted("study", "FullTraining()", ("value",), 40, 2, "RandomSampler", 0.0)])
    for one in parting:
        search.driver.log.write([TrialEnded("study", one.trial, "COMPLETE", (1.0,), 40, at=0.0)])
    draw = AuditDraw(search.plan, "1")
    audits = [draw.audit(one, AuditId("a")) for one in iter(draw.next, None)]
    whole = [audit.segment for audit in audits if not audit.segment.captured]
    assert len(whole) == 2
    for segment in whole:
        assert (segment.source, segment.start, segment.stop) == (None, 0, 40)
        assert [stage.start for stage in segment.stages[1:]] == [stage.stop for stage in segment.stages[:-1]]
        assert [goal.step for goal in segment.compared] == list(range(4, 41, 4))
    assert [audit.segment.captured for audit in audits[7::8]][:2] == [False, False]


def test_an_audit_starts_from_the_nearest_saved_state_and_compares_every_known_state_after_it() -> None:
    plan = trained([trial(i, {"a": s.piecewise({0: 1, 12: i + 1})}, 16) for i in range(2)])
    node = plan.trials[TrialId("study/1")].node_at(16)
    assert node.parent is not None
    draw = AuditDraw(plan, "1")

    def audited(step: int) -> tuple[StateKey | None, Mapping[int, int], list[int]]:
        segment = draw.audit(Drawn(1.0, node.id, step, whole=False), AuditId("a")).segment
        stages = {stage.start: stage.stop for stage in segment.stages}
        return segment.source, stages, [goal.step for goal in segment.compared]

    assert audited(16) == (plan.key(node.parent, 12), {12: 16}, [16])
    plan._keep(node.parent.states[12], None)
    assert audited(16) == (plan.key(node.parent, 8), {8: 12, 12: 16}, [12, 16])
    for step in (4, 8):
        plan._keep(node.parent.states[step], None)
    assert audited(16) == (None, {0: 12, 12: 16}, [4, 8, 12, 16])
