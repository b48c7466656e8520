"""Worker-hours paid: who had which workers, and for how long, as the journal records it."""

from __future__ import annotations

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.accounting.book import Book, open_book
from hpstage.accounting.presence import Presence
from hpstage.accounting.studies import study_rows
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.execution.simulated_cluster import Scaling, SimulatedCluster
from hpstage.plan.facts import ChainStarted, DriverId, Fact, WorkerId, WorkersChanged
from hpstage.plan.log import encode, read_facts
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Failing

A, B = DriverId("a"), DriverId("b")
ONE, TWO = WorkerId("one"), WorkerId("two")


def joined(driver: DriverId, at: float, *workers: WorkerId, pool: str = "pool") -> WorkersChanged:
    return WorkersChanged(driver, at, pool, joined=workers)


def left(driver: DriverId, at: float, *workers: WorkerId) -> WorkersChanged:
    return WorkersChanged(driver, at, "pool", left=workers)


def folded(*facts: WorkersChanged) -> Presence:
    presence = Presence()
    presence.serve(A, "study a")
    presence.serve(B, "study b")
    for fact in facts:
        presence.change(fact)
    return presence


def test_a_worker_is_allocated_from_joining_to_leaving_and_again_when_it_comes_back() -> None:
    presence = folded(joined(A, 10, ONE, TWO), left(A, 15, ONE), joined(A, 20, ONE), left(A, 21, ONE, TWO))
    assert presence.seconds() == presence.seconds("study a") == 5 + 1 + 11
    assert presence.seconds("study b") == 0


def test_a_present_worker_is_allocated_up_to_the_latest_report() -> None:
    presence = folded(joined(A, 10, ONE))
    assert presence.seconds() == 0
    presence.advance(17)
    presence.advance(12)
    assert presence.seconds() == 7


def test_seconds_of_a_worker_shared_by_two_studies_are_split_and_count_once_for_the_plan() -> None:
    presence = folded(joined(A, 0, ONE), joined(B, 10, ONE, TWO), left(A, 30, ONE), left(B, 40, ONE, TWO))
    assert presence.seconds() == 40 + 30
    assert presence.seconds("study a") == 10 + 20 / 2
    assert presence.seconds("study b") == 20 / 2 + 10 + 30


def test_equally_named_workers_of_two_clusters_count_as_two_workers() -> None:
    presence = folded(joined(A, 0, ONE), joined(B, 0, ONE, pool="another"), left(A, 10, ONE), left(B, 10, ONE))
    assert presence.seconds() == 20
    assert presence.seconds("study a") == presence.seconds("study b") == 10


def test_slots_of_one_worker_count_as_one_worker() -> None:
    presence = folded(joined(A, 0, ONE, WorkerId("one#1")), left(A, 5, ONE), left(A, 9, WorkerId("one#1")))
    assert presence.seconds() == 5


def test_workers_of_a_dead_driver_are_allocated_until_the_last_report() -> None:
    presence = folded(joined(A, 0, ONE))
    presence.advance(8)
    presence.end(A)
    presence.change(joined(B, 1000, ONE))
    presence.advance(1001)
    assert presence.seconds("study a") == 8 and presence.seconds() == 9
    presence.end(A)  # as two others may find
    presence.change(left(A, 1002, ONE))
    assert presence.seconds("study a") == 8


def test_allocated_seconds_are_not_counted_twice_if_reports_arrive_out_of_order() -> None:
    presence = folded(joined(A, 10, ONE), joined(B, 5, ONE), left(B, 7, ONE), left(A, 20, ONE))
    assert presence.seconds() == 10


def grid(trial: optuna.Trial) -> dict[str, object]:
    return {"a": s.piecewise({0: trial.suggest_int("a", 1, 3), 20: trial.suggest_int("late", 1, 4)})}


def search(
    journal: MemoryJournal, executor: SimulatedExecutor, name: str = "study", **options: object
) -> hpstage.Result:
    study = optuna.create_study(study_name=name, sampler=optuna.samplers.RandomSampler(seed=0))
    given: dict[str, object] = {"metric": "value", "steps": 40, "n_trials": 12} | options
    return hpstage.optimize(study, Failing(), grid, executor=executor, store=journal, **given)  # type: ignore[arg-type]


def test_a_fixed_fleet_is_allocated_for_the_whole_search_in_result_report_and_status() -> None:
    journal, executor = MemoryJournal(), SimulatedExecutor(4, evaluate_seconds=0.5)
    result = search(journal, executor)
    assert result.savings.paid_seconds == pytest.approx(4 * executor.clock())
    assert result.savings.paid_seconds > result.savings.worker_seconds
    book = open_book(journal)
    assert book.savings.paid_seconds == result.savings.paid_seconds
    (row,) = study_rows(book, lambda study: False)
    assert row.seconds_paid == book.account.presence.seconds() == result.savings.paid_seconds


def test_an_elastic_fleet_is_allocated_only_while_its_workers_are_present() -> None:
    journal, executor = MemoryJournal(), SimulatedExecutor(SimulatedCluster(1, scaling=Scaling(1, 8, 5.0)))
    paid = search(journal, executor).savings.paid_seconds
    assert executor.cluster.most > 2
    assert 0 < paid < 0.9 * executor.cluster.most * executor.clock()
    assert paid <= executor.cluster.paid_seconds  # which counts their start, too


def test_allocated_seconds_of_a_plan_are_the_sum_of_those_of_its_two_studies() -> None:
    journal, kept = MemoryJournal(), set()  # type: ignore[var-annotated]
    first = search(journal, SimulatedExecutor(2, kept=kept)).savings.paid_seconds
    other = search(journal, SimulatedExecutor(3, kept=kept), "other", steps=60).savings.paid_seconds
    book = open_book(journal)
    assert [row.seconds_paid for row in study_rows(book, lambda study: False)] == pytest.approx([first, other])
    assert book.savings.paid_seconds == pytest.approx(first + other)
    assert Book(book.account, "other").savings.paid_seconds == pytest.approx(other)


def test_workers_are_allocated_from_their_first_chain_if_an_old_journal_records_no_joining() -> None:
    journal, executor = MemoryJournal(), SimulatedExecutor(3)
    search(journal, executor)
    facts: list[Fact] = [fact for fact in read_facts(journal) if not isinstance(fact, WorkersChanged)]
    old = MemoryJournal()
    old.append([encode(fact) for fact in facts])
    starts: dict[WorkerId, float] = {}
    for fact in facts:
        if isinstance(fact, ChainStarted):
            starts.setdefault(fact.worker, fact.at)
    last = max(fact.at for fact in facts if hasattr(fact, "chain") and hasattr(fact, "at"))
    assert open_book(old).savings.paid_seconds == pytest.approx(sum(last - start for start in starts.values()))


def test_a_resumed_search_counts_the_allocated_seconds_of_the_interrupted_search() -> None:
    journal, kept = MemoryJournal(), set()  # type: ignore[var-annotated]
    study = optuna.create_study(study_name="study", sampler=optuna.samplers.RandomSampler(seed=0))

    def interrupt(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number == 5:
            raise KeyboardInterrupt

    first = SimulatedExecutor(2, kept=kept)
    options = {"metric": "value", "steps": 40, "n_trials": 12, "store": journal}
    with pytest.raises(KeyboardInterrupt):
        hpstage.optimize(study, Failing(), grid, executor=first, callbacks=[interrupt], **options)  # type: ignore[arg-type]
    until = open_book(journal).account.presence.seconds()
    assert until == pytest.approx(2 * first.clock())
    second = SimulatedExecutor(3, kept=kept)
    result = hpstage.optimize(study, Failing(), grid, executor=second, **options)  # type: ignore[arg-type]
    assert result.savings.paid_seconds == pytest.approx(until + 3 * second.clock())
