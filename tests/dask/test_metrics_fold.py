"""The numbers of the board, which are kept as records come, against those that are counted from the whole."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpstage
from hpstage import schedule as s
from hpstage.accounting.account import Account, new_account
from hpstage.accounting.book import Book
from hpstage.accounting.branch_states import cut, running
from hpstage.accounting.studies import study_rows
from hpstage.cluster.dashboard.board import Board, PlanView
from hpstage.cluster.dashboard.follower import NO_MORE, RECORDS
from hpstage.cluster.dashboard.study import StudyView
from hpstage.driver.driver import Driver
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.checks import FORMAT
from hpstage.plan.facts import (
    ChainLost,
    DriverId,
    DriverJoined,
    DriverLeft,
    Fact,
    NodeId,
    PlanCreated,
    SearchEnded,
    SearchStarted,
    StageFailed,
    StateLost,
    TargetAsked,
    TrialAdded,
    TrialId,
    TrialProposed,
    UserFailure,
    WorkerId,
)
from hpstage.plan.log import open_plan, read_facts
from hpstage.scheduler.scheduler import Scheduler
from hpstage.store import MemoryJournal
from tests.dask.steady import Steady
from tests.dask.studies import search
from tests.records import separated
from tests.unit.searches import WORKLOAD, searches


def started(study: str) -> SearchStarted:
    return SearchStarted(study, "algorithm", ("value",), 8, None, "sampler", 0.0, identity=study)


class Study:
    """A driver at work on a study, with two simulated workers of its own."""

    def __init__(self, name: str, journal: MemoryJournal, pid: int) -> None:
        self.name = name
        # A node's seconds per step change as it is trained on.
        self.executor = SimulatedExecutor(
            2,
            step_seconds=lambda values: 0.5 + float(values["a"] or 0),
            evaluate_seconds=0.3,
            load_seconds=0.1,
            save_seconds=0.2,
            state_bytes=7,
        )
        self.plan = open_plan(journal, WORKLOAD, {})
        self.scheduler = Scheduler(self.plan, driver=DriverId(name), pool=name, checkpoint_every=3)
        self.driver = Driver(self.plan, self.scheduler, self.executor, journal)
        self.driver.log.write([DriverJoined(DriverId(name), name, "a host", pid, 0.0), started(name)])
        self.left = 0

    def ask(self, trials: Sequence[TrialAdded], stops: Sequence[int]) -> None:
        mine = [TrialAdded(TrialId(f"{self.name}/{i}"), added.schedules, added.steps) for i, added in enumerate(trials)]
        proposed: list[Fact] = [TrialProposed(self.name, i, added.trial, {}) for i, added in enumerate(mine)]
        self.driver.log.write(proposed)
        self.driver.add(mine)
        for added, stop in zip(mine, stops, strict=True):
            self.driver.ask(added.trial, stop)
        self.left += len(mine)

    def turn(self) -> None:
        self.left -= len(self.driver.wait())


def pieces_of(view: PlanView, study: StudyView) -> list[tuple[NodeId, str]]:
    ahead = running(view.plan)
    return [
        (id, state)
        for id, branch in study.branches.items()
        for *_, state in cut(view, study.name, branch, ahead.get(id))
    ]


def check_stages(view: PlanView) -> None:
    for study in view.studies.values():
        assert Counter(state for _, state in pieces_of(view, study)) == +study.stages
        assert all(count >= 0 for count in study.stages.values())
        assert study.trials_by_end == Counter(study.trials.values())
        ranked = sorted(
            study.standings.results.values(),
            key=lambda result: (
                study.trials[result.trial] != "COMPLETE", result.value, len(result.trial), result.trial,
            ),
        )  # fmt: skip
        assert study.standings.best(5) == ranked[:5]


def check_that_all_say_the_same(view: PlanView, account: Account) -> None:
    """The board, a report, ``hpstage status`` and a search's result, of each study."""
    assert view.failures() == account.failures()
    rows = {row.study: row for row in study_rows(Book(account), view.is_driven)}
    for name, study in view.studies.items():
        book, totals, row = Book(account, name), study.totals, rows[name]
        branches = {id: (branch.reach, branch.trials) for id, branch in study.branches.items()}
        assert branches == {id: (branch.reach, branch.trials) for id, branch in book.branches.items()}
        reported = book.savings
        for what in ("steps_asked", "steps_unique", "steps_trained", "steps_wasted"):
            assert getattr(totals, what) == getattr(reported, what)
        for what in ("train_seconds", "evaluate_seconds", "load_seconds", "save_seconds", "wasted_seconds"):
            assert getattr(totals, what) == getattr(reported, what)
        assert (row.steps_asked, row.steps_unique) == (totals.steps_asked, totals.steps_unique)
        assert row.seconds_used == totals.worker_seconds
        reused = {node for node, state in pieces_of(view, study) if state == "reused"}
        assert reused <= {
            id for id, branch in study.branches.items() for *_, requester in view.first_requests(branch.node, 0, 10**9)
            if requester.study != name
        }  # fmt: skip


wishes = searches().flatmap(
    lambda trials: st.tuples(st.just(trials), st.lists(st.integers(1, 8), min_size=len(trials), max_size=len(trials)))
)


@pytest.mark.ci
@given(st.lists(wishes, min_size=2, max_size=2), st.integers(), st.integers(1, 12), st.integers(0, 6))
def test_stage_counts_equal_those_of_the_stage_tree_when_workers_and_drivers_die(wishes, seed, when, deaths):
    journal = MemoryJournal()
    choose = random.Random(seed)
    dying, other = Study("dying", journal, 1), Study("other", journal, 2)
    for study, (trials, stops) in zip((dying, other), wishes, strict=True):
        study.ask(trials, stops)
    for number in range(deaths):
        other.executor.cluster.join(number)
        other.executor.cluster.kill(WorkerId(f"sim-{number}"), number + 0.5)
    for _ in range(when):
        choose.choice([dying, other]).turn()
    other.driver.log.write([DriverLeft(DriverId("dying"), 0.0, "gone")])
    while other.left > 0:
        other.turn()
    other.driver.finish()
    other.driver.log.write([SearchEnded("other", 1.0)])
    board = Board()
    for position, record in enumerate(journal.read()):
        board.offer("plan", position, [record])
        check_stages(board.plans["plan"])
    [view] = board.plans.values()
    assert not view.problem and view.position == len(journal)
    assert view.drivers_lost == 1 and view.drivers_rejoined == 0
    at_once = Board()
    at_once.offer("plan", 0, journal.read())
    assert {study.name: +study.stages for study in at_once.plans["plan"].studies.values()} == {
        study.name: +study.stages for study in view.studies.values()
    }
    # Whatever a study's chains took is the plan's, lost chains included: there is no other study.
    totals = view.plan.totals
    assert sum(study.totals.worker_seconds for study in view.studies.values()) == pytest.approx(totals.worker_seconds)
    assert sum(study.totals.steps_trained for study in view.studies.values()) == totals.steps_trained
    lost = [fact for fact in read_facts(journal) if isinstance(fact, ChainLost)]
    assert sum(study.totals.steps_wasted for study in view.studies.values()) == sum(fact.steps for fact in lost)
    account = new_account(journal)
    account.catch_up(journal)
    alone = sum(Book(account, "other").alone.values())
    assert view.alone_seconds("other") == pytest.approx(alone, abs=1e-3)
    check_that_all_say_the_same(view, account)


@pytest.mark.ci
@given(wishes, st.integers())
def test_stage_counts_equal_those_of_the_stage_tree_when_user_code_raises(wish, seed):
    journal = MemoryJournal()
    choose = random.Random(seed)
    study = Study("study", journal, 1)
    study.ask(*wish)
    while study.left > 0:
        study.turn()
    board = Board()
    position, failures = 0, 0
    for record in journal.read():
        position = board.offer("plan", position, [record])
        [view] = board.plans.values()
        check_stages(view)
        if view.plan.nodes and choose.random() < 0.3:
            # Training comes past it later, as that of a search does that begins again.
            node = choose.choice(view.plan.nodes)
            step = view.front(node.id) + choose.randrange(3)
            failed = StageFailed(node.id, step, False, UserFailure("", ""))
            position = board.offer("plan", position, [msgspec.json.encode(failed)])
            failures += 1
            check_stages(view)
        assert all(view.front(failed.node) <= failed.step for failed in view.failures())
    [view] = board.plans.values()
    assert not view.problem and view.failed == ({"train": failures} if failures else {})


def test_a_driver_declared_dead_that_joins_again_is_counted_as_rejoined() -> None:
    journal = MemoryJournal()
    Study("first", journal, 1)
    here = open_plan(journal, WORKLOAD, {})
    driver = Driver(here, Scheduler(here, driver=DriverId("x"), pool="x"), SimulatedExecutor(1), journal)
    driver.log.write(
        [
            DriverLeft(DriverId("first"), 0.0, "gone"),
            DriverJoined(DriverId("other"), "p", "a host", 2, 0.0),
            DriverLeft(DriverId("other"), 0.0, "ended"),
            DriverJoined(DriverId("again"), "p", "a host", 1, 0.0),
            DriverJoined(DriverId("restarted"), "p", "a host", 2, 0.0),
        ]
    )
    board = Board()
    board.offer("plan", 0, journal.read())
    assert (board.plans["plan"].drivers_lost, board.plans["plan"].drivers_rejoined) == (1, 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"node": 12345}, "record {} of the journal contradicts"),
        ({"metrics": {"value": "high"}}, "Expected `str` matching regex"),
        ({"trial": "another/7"}, "record {} of the journal contradicts"),
    ],
)
def test_a_damaged_plan_is_reported_and_not_requested_again(change: dict[str, object], problem: str) -> None:
    journal = MemoryJournal()
    search(Steady(None), hpstage.InlineExecutor(), journal, n_trials=2)
    facts = [json.loads(record) for record in separated(journal).read()]
    kind = "TargetAsked" if "trial" in change else "StateReached"
    position = next(i for i, fact in enumerate(facts) if fact["type"] == kind and fact.get("metrics", 1))
    facts[position] |= change
    board = Board()
    assert board.offer("plan", 0, [json.dumps(fact).encode() for fact in facts]) == NO_MORE
    assert problem.format(position) in board.plans["plan"].problem


@pytest.mark.ci
def test_a_plan_counts_as_complete_once_a_driver_has_sent_its_last_records() -> None:
    journal = MemoryJournal()
    search(Steady(None), hpstage.InlineExecutor(), journal, n_trials=40)
    records = separated(journal).read()
    assert len(records) > RECORDS
    board = Board()
    assert board.offer("plan", 0, []) == 0 and not board.plans["plan"].has_end
    assert board.offer("plan", 0, records[:RECORDS]) == RECORDS and not board.plans["plan"].has_end
    board.offer("plan", RECORDS, records[RECORDS : RECORDS + 1])
    assert board.plans["plan"].has_end


@pytest.mark.ci
def test_lost_checkpoints_are_counted_as_evicted_or_unreadable(tmp_path: Path) -> None:
    journal = MemoryJournal()
    study = optuna.create_study(study_name="study", sampler=optuna.samplers.RandomSampler(seed=0))
    hpstage.optimize(
        study, Steady(None), lambda trial: {"a": trial.suggest_float("a", 0, 1)}, metric="score", steps=4, n_trials=20,
        store=journal, checkpoints=tmp_path, checkpoint_every=1, checkpoint_budget="2 kB",
        executor=hpstage.InlineExecutor(),
    )  # fmt: skip
    board = Board()
    board.offer("plan", 0, journal.read())
    [view] = board.plans.values()
    lost = sum(b"StateLost" in record for record in separated(journal).read())
    assert lost > 0 and view.states_lost == {"evicted": lost}
    [state, *_] = view.plan.kept.values()
    record = msgspec.json.encode(StateLost(state.node.id, state.step, "unreadable", "its file is not there"))
    board.offer("plan", len(journal), [record, record])
    assert view.states_lost == {"evicted": lost, "unreadable": 1}


def test_a_resumed_study_counts_steps_that_another_study_trained_in_between(tmp_path: Path) -> None:
    journal = MemoryJournal()
    storage = optuna.storages.InMemoryStorage()

    def go(name: str, *, interrupted: bool = False) -> hpstage.Result:
        def space(trial: optuna.Trial) -> dict[str, object]:
            if interrupted and trial.number == 3:
                signal.raise_signal(signal.SIGINT)
            return {"a": trial.suggest_float("a", 0, 1)}

        study = optuna.create_study(
            study_name=name, storage=storage, load_if_exists=True, sampler=optuna.samplers.RandomSampler(seed=1)
        )
        return hpstage.optimize(
            study, Steady(None), space, metric="score", steps=20, n_trials=4, store=journal, checkpoints=tmp_path,
            executor=hpstage.InlineExecutor(), verify="off",
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        go("away", interrupted=True)
    go("other")
    resumed = go("away")
    view, account = PlanView(), new_account(journal)
    account.catch_up(journal)
    for record in journal.read():
        view.fold([record])
    check_that_all_say_the_same(view, account)
    away = view.studies["away"]
    assert away.totals.answers == 4 and away.standings.rungs[20].evaluated == 4
    alone = sum(Book(account, "away").alone.values())
    assert view.alone_seconds("away") == pytest.approx(alone, abs=1e-3)
    assert resumed.savings.worker_seconds_alone == pytest.approx(alone, abs=1e-3)
    assert resumed.savings.lower_bound_seconds is None  # it resumed an earlier call, whoever has paid for its steps


def test_a_study_that_starts_after_its_trials_were_requested_shows_branches_from_the_root() -> None:
    trial = TrialAdded(TrialId("late/0"), {"a": s.piecewise({0: 1, 5: 2})}, 10)
    plain = TrialAdded(TrialId("late/1"), {"a": s.constant(1)}, 10)
    view = PlanView()
    for fact in [
        PlanCreated(FORMAT, WORKLOAD, {}),
        plain,
        trial,
        TargetAsked(trial.trial, 5),
        started("late"),
        TrialProposed("late", 0, trial.trial, {}),
        TargetAsked(trial.trial, 10),
    ]:
        view.fold_fact(fact)
    branches = view.studies["late"].branches.values()
    assert [(branch.node.start, branch.reach, branch.trials) for branch in branches] == [(0, 5, 1), (5, 10, 1)]
