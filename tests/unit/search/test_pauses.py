"""A search that was driven in several calls: the time between them is no work, no waiting, and in no picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import hpstage
from hpstage import schedule as s
from hpstage.accounting.account import Account
from hpstage.accounting.book import Book
from hpstage.accounting.causes import causes_of
from hpstage.accounting.history import moments
from hpstage.accounting.pauses import Pauses
from hpstage.accounting.savings import Savings, savings_of
from hpstage.accounting.timeline import timeline_of
from hpstage.algos import FullTraining
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import (
    ChainClosed,
    ChainId,
    ChainStarted,
    DriverId,
    Fact,
    NodeId,
    Span,
    StateKey,
    StateReached,
    TargetAsked,
    TrialAdded,
    TrialId,
    WorkerId,
    WorkersChanged,
)
from hpstage.plan.log import read_facts
from hpstage.plan.plan import SearchPlan
from hpstage.report import draw_merge_rate, draw_timeline, open_book, write_report
from hpstage.store.memory import MemoryJournal
from hpstage.testing.toys import Tape
from tests.unit.reports import Page, search
from tests.unit.searches import WORKLOAD, trial

NIGHT = 2.0**15  # seconds, so that shifting is exact
encode = msgspec.json.Encoder().encode


def changed(journal: MemoryJournal, change: Callable[[Fact, int], Fact]) -> MemoryJournal:
    """The journal with each fact as ``change`` makes it, which gets the number of the call that was running."""
    calls: dict[DriverId, int] = {}
    now = 0
    facts: list[Fact] = []
    for fact in read_facts(journal):
        if isinstance(fact, ChainStarted | WorkersChanged):
            now = calls.setdefault(fact.driver, len(calls))
        facts.append(change(fact, now))
    found = MemoryJournal()
    found.append([encode(fact) for fact in facts])
    return found


def shifted(journal: MemoryJournal, seconds: dict[int, float]) -> MemoryJournal:
    """The same, but that what the ``n``-th call's workers did is ``seconds[n]`` later."""

    def later(fact: Fact, call: int) -> Fact:
        at = getattr(fact, "at", None)
        # In 2**-20 s, in which sums are exact.
        return fact if at is None else replace(fact, at=round(at * 2**20) / 2**20 + seconds[call])

    return changed(journal, later)


def renamed(journal: MemoryJournal) -> MemoryJournal:
    """The same, with workers of its own for each call, as where each brings up a cluster."""

    def elsewhere(fact: Fact, call: int) -> Fact:
        if isinstance(fact, WorkersChanged):
            joined, left = (
                tuple(WorkerId(f"{one} of call {call}") for one in some) for some in (fact.joined, fact.left)
            )
            return replace(fact, joined=joined, left=left)
        worker = getattr(fact, "worker", None)
        return fact if worker is None else replace(fact, worker=f"{worker} of call {call}")

    return changed(journal, elsewhere)


@pytest.fixture(scope="module")
def called_twice() -> tuple[MemoryJournal, float]:
    """Two calls of one search, the second with a clock from 0 again; and when the first was over."""
    journal, kept = MemoryJournal(), set[StateKey]()  # else threads look for the first one's states, on no virtual time
    first = search(journal, n_trials=8, kept=kept)
    book = open_book(journal)
    over = max(worked.last for worked in book.workers.values())
    search(journal, study=first.study, extend=True, n_trials=16, algorithm=FullTraining(), kept=kept)
    return journal, round(over * 2**20) / 2**20


def test_pauses_between_calls_are_not_idle_time_and_not_part_of_the_makespan(
    called_twice: tuple[MemoryJournal, float],
) -> None:
    journal, over = called_twice
    at_once, next_day = (open_book(shifted(journal, {0: 0.0, 1: over + pause})) for pause in (0.0, NIGHT))
    [(start, stop)] = next_day.pauses.gaps
    assert start == pytest.approx(over) and stop - start == pytest.approx(NIGHT + at_once.pauses.seconds, abs=1.0)
    for value in (lambda book: book.savings.makespan, lambda book: causes_of(book).idle):
        assert value(next_day) == pytest.approx(value(at_once), abs=1e-3)
    view, other = timeline_of(next_day), timeline_of(at_once)
    assert view is not None and other is not None
    assert view.span == pytest.approx(other.span, abs=1e-3) and len(view.pauses) == 1
    assert [(b.worker, b.activity, round(b.began, 3), round(b.seconds, 3)) for b in view.bars] == [
        (b.worker, b.activity, round(b.began, 3), round(b.seconds, 3)) for b in other.bars
    ]
    rates = [
        [(round(m.seconds, 3), m.requested, m.unique, m.trained) for m in moments(book)] for book in (next_day, at_once)
    ]
    assert rates[0] == rates[1]


@pytest.mark.ci
def test_pictures_and_page_of_a_report_name_the_pauses_that_they_leave_out(
    called_twice: tuple[MemoryJournal, float], tmp_path: Path
) -> None:
    journal, over = called_twice
    paused = shifted(journal, {0: 0.0, 1: over + NIGHT})
    page = Page(write_report(tmp_path, paused))
    assert "without 1 pause between calls (9.10 h)" in page.text
    figures = json.loads((tmp_path / "savings.json").read_text())
    assert figures["makespan"] < NIGHT / 100
    book = open_book(paused)
    assert draw_timeline(book).axes[0].get_xlabel().endswith("without pauses (dashed)")
    assert draw_merge_rate(book).axes[1].get_xlabel().endswith("without the pauses between calls")
    assert "pause" not in Page(write_report(tmp_path, journal)).text  # their clocks overlap


def test_a_worker_is_present_only_during_the_calls_that_it_works_for(called_twice: tuple[MemoryJournal, float]) -> None:
    journal, over = called_twice
    shared = shifted(journal, {0: 0.0, 1: over + NIGHT})
    own = renamed(shared)
    one, other = (open_book(each) for each in (shared, own))
    expected = len({fact.worker for fact in read_facts(own) if isinstance(fact, StateReached)})
    assert len(one.workers) == 3 and len(other.workers) == expected > 3
    assert one.savings.workers == other.savings.workers == 3
    assert one.savings.lower_bound_seconds == other.savings.lower_bound_seconds
    for book in (one, other):
        view = timeline_of(book)
        assert view is not None
        there = [sum(stop - start for start, stop in periods) for periods in view.there]
        assert sum(there) == pytest.approx(3 * view.span) and all(len(periods) == 1 for periods in view.there)
    said = [draw_timeline(book).get_suptitle() for book in (one, other)]
    assert said[0].startswith("3 workers, busy ") and said[1].startswith(f"{expected} workers, busy ")
    assert said[0].split()[3] == said[1].split()[3], "the share of busy time"
    assert said[1].endswith(" of their time, first stage to last") and said[0].endswith(" seconds, first stage to last")


def test_a_worker_is_not_idle_in_a_call_for_which_only_other_workers_worked() -> None:
    def idle(second: str) -> float:
        account = Account(SearchPlan(WORKLOAD))
        added = trial(0, {"a": s.constant(1)}, 8)
        account.fold(added)
        account.fold(TargetAsked(added.trial, 8))
        for call, name in enumerate(["w", second, "w"]):
            worker, chain, began = WorkerId(name), ChainId(str(call)), 100.0 * call
            spans = (Span(NodeId(0), 0, 8),)
            account.fold(ChainStarted(chain, DriverId(str(call)), worker, spans, began))
            for start, at in ((0, 4.0), (4, 10.0)):  # of four seconds each
                account.fold(StateReached(chain, worker, NodeId(0), start, start + 4, began + at, 4.0))
            account.fold(ChainClosed(chain, began + 10.0))
        return causes_of(Book(account)).idle

    assert idle("w") == idle("another") == 3 * 2.0


def test_overlapping_calls_have_no_pause_between_them(called_twice: tuple[MemoryJournal, float]) -> None:
    journal, _ = called_twice
    assert open_book(journal).pauses.gaps == []


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10))), st.integers(-5, 70), st.integers(-5, 70))
def test_elapsed_time_excludes_the_gaps_between_periods(periods: list[tuple[int, int]], start: int, stop: int) -> None:
    spans = [(float(begin), float(begin + length)) for begin, length in periods]
    pauses = Pauses(spans)
    first, last = min((b for b, _ in spans), default=0), max((e for _, e in spans), default=0)

    def is_pause(at: int) -> bool:  # the second from ``at`` on
        return first <= at < last and not any(begin <= at and at + 1 <= end for begin, end in spans)

    start, stop = min(start, stop), max(start, stop)
    assert pauses.elapsed(start, stop) == sum(not is_pause(at) for at in range(start, stop))
    assert pauses.seconds == sum(map(is_pause, range(-5, 80)))


def test_savings_of_an_interrupted_search_count_all_its_calls_without_the_pause() -> None:
    """What its calls did, and how long they were at work, count from where it began; the night between does not."""
    journal, shelf = MemoryJournal(), set[StateKey]()
    study = optuna.create_study(study_name="study", sampler=optuna.samplers.RandomSampler(seed=1))

    def call(executor: SimulatedExecutor, *callbacks: Callable[..., None]) -> Savings:
        def space(trial: optuna.Trial) -> dict[str, object]:
            return {"a": s.piecewise({0: 1, 40: trial.suggest_int("a", 0, 99)})}

        options: dict[str, Any] = {"metric": "value", "steps": 100, "n_trials": 6, "store": journal}
        return hpstage.optimize(study, Tape(), space, executor=executor, callbacks=callbacks, **options).savings

    def interrupt(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number == 2:
            raise KeyboardInterrupt

    evening = SimulatedExecutor(2, kept=shelf)
    with pytest.raises(KeyboardInterrupt):
        call(evening, interrupt)
    morning = SimulatedExecutor(0, kept=shelf)
    for _ in range(2):
        morning.cluster.join(NIGHT)
    saved = call(morning)
    assert saved.steps_trained == saved.worker_seconds == saved.train_seconds
    assert saved.steps_unique == 40 + 6 * 60 <= saved.steps_trained
    assert saved.worker_seconds / 2 <= saved.makespan <= saved.worker_seconds
    assert saved.makespan <= evening.clock() + morning.clock() - NIGHT


def test_training_of_other_studies_is_not_part_of_the_makespan() -> None:
    def trained(chain: str, driver: str, at: float) -> list[Fact]:
        span = Span(NodeId(0), 0, 5)
        reached = StateReached(ChainId(chain), WorkerId("worker"), NodeId(0), 0, 5, at + 5.0, 5.0)
        return [ChainStarted(ChainId(chain), DriverId(driver), WorkerId("worker"), (span,), at), reached]

    account = Account(SearchPlan(WORKLOAD))
    for study in ("mine", "other"):
        added = TrialAdded(TrialId(f"{study}/0"), {"a": s.constant(1)}, 8)
        account.fold(added)
        account.fold(TargetAsked(added.trial, 5, DriverId(study)))
    start, begun_before = trained("begun before", "other", 0.0)
    for fact in (start, *trained("first", "mine", 10.0), begun_before, *trained("long after", "other", 90.0)):
        account.fold(fact)
    assert savings_of(account, "mine").makespan == 5.0
    assert savings_of(account, "other").makespan == 95.0
    assert savings_of(account, "nobody's").makespan == 0.0
