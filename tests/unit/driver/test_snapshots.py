"""Drivers write snapshots of their plan now and then, and later calls open it from them."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.driver import snapshots
from hpstage.driver.snapshots import SnapshotWriter
from hpstage.errors import StoreError
from hpstage.plan.facts import TrialAdded, TrialId
from hpstage.plan.log import encode, open_existing_plan, open_plan
from hpstage.plan.snapshot import restored
from hpstage.store import MemoryJournal, SQLiteJournal
from hpstage.testing.toys import Tape
from tests.invariants import validate
from tests.unit.driver.test_several_drivers import Study
from tests.unit.searches import WORKLOAD


class Slow(MemoryJournal):
    """Writes each snapshot when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Semaphore(0)
        self.written: list[int] = []

    def write_snapshot(self, content: bytes) -> None:
        self.may.acquire()
        self.written.append(restored(content, WORKLOAD, sharing=True).position)
        super().write_snapshot(content)


def grow(store: MemoryJournal, plan, records: int) -> None:
    facts = [TrialAdded(TrialId(f"s/{plan.position + n}"), {"a": s.constant(n)}, 8) for n in range(records)]
    store.append([encode(fact) for fact in facts])
    for fact in facts:
        plan.apply(fact)
    plan.cursor = plan.cursor.after([encode(fact) for fact in facts])


def test_a_snapshot_is_written_each_time_the_journal_has_grown_by_a_fixed_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "LEAST", 10)
    store = Slow()
    plan = open_plan(store, WORKLOAD, {})
    writer = SnapshotWriter(store, plan)
    due = []
    for _ in range(60):
        grow(store, plan, 5)
        writer.write_if_due()
        store.may.release()
        if writer._writing is not None:
            writer._writing.result()
        due.append(plan.position)
    writer.close()
    assert store.written[:3] == [11, 21, 31] and store.written[-1] > 250
    steps = [(after - before) / before for before, after in pairwise(store.written)]
    assert all(step >= snapshots.GROWTH for step in steps) and min(steps) < 1.3 * snapshots.GROWTH
    assert set(store.written) <= set(due)
    opened = open_plan(store, WORKLOAD, {})
    assert opened.restored == store.written[-1] and opened.position == plan.position


def test_the_plan_grows_while_a_snapshot_is_written_and_the_next_snapshot_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "LEAST", 10)
    store = Slow()
    plan = open_plan(store, WORKLOAD, {})
    writer = SnapshotWriter(store, plan)
    grow(store, plan, 20)
    writer.write_if_due()
    for _ in range(10):  # the store is slow
        grow(store, plan, 100)
        writer.write_if_due()
    assert store.written == [] and plan.position == 1021
    store.may.release()
    assert writer._writing is not None
    writer._writing.result()
    assert store.written == [21]
    writer.write_if_due()
    store.may.release()
    writer.close()
    assert store.written == [21, 1021]


def test_a_search_succeeds_when_its_store_cannot_write_snapshots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(MemoryJournal):
        def write_snapshot(self, content: bytes) -> None:
            raise StoreError("the disk is full")

    monkeypatch.setattr(snapshots, "LEAST", 10)
    store = Refusing()
    with caplog.at_level(logging.INFO, "hpstage"):
        result = optimize(store, n_trials=8)
    assert "The snapshot of the plan was not written: the disk is full" in caplog.messages
    assert len(result.study.trials) == 8 and store.read_snapshot() is None


def space(trial: optuna.Trial) -> dict[str, object]:
    a = s.piecewise({0: trial.suggest_int("a", 1, 2), 6: trial.suggest_int("late", 1, 3)})
    return {"a": a, "b": trial.suggest_float("b", 0.5, 1.0, step=0.5)}


def optimize(store: object, *, seed: int = 1, n_trials: int = 16, name: str = "study") -> hpstage.Result:
    return hpstage.optimize(
        optuna.create_study(study_name=name, direction="maximize", sampler=optuna.samplers.RandomSampler(seed=seed)),
        Tape(),
        space,
        metric="score",
        steps=16,
        n_trials=n_trials,
        algorithm=SuccessiveHalving(min_steps=4, reduction_factor=2),
        executor=hpstage.InlineExecutor(),
        store=store,
        show_progress_bar=False,
    )


def outcome(result: hpstage.Result) -> object:
    trials = [(trial.number, trial.params, trial.state, trial.values) for trial in result.study.trials]
    return trials, result.plan.totals.steps_trained, result.savings.steps_unique, len(result.plan.kept)


@pytest.mark.ci
def test_a_later_search_that_opens_the_plan_from_a_snapshot_has_the_results_without_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for least in (10**9, 20):
        monkeypatch.setattr(snapshots, "LEAST", least)
        folder = tmp_path / str(least)
        first, second = optimize(folder), optimize(folder, seed=2, n_trials=20, name="other")
        found.append((outcome(first), outcome(second)))
        validate(second.plan)
        assert (folder / "plan.sqlite-snapshot").exists() == (least == 20)
        assert bool(second.plan.restored) == (least == 20)
        if least == 20:
            with closing(SQLiteJournal(folder / "plan.sqlite", read_only=True)) as journal:
                plan = open_existing_plan(journal)
                assert plan.restored == plan.position == len(journal), "the call ended with a snapshot"
                assert not plan.drivers and not plan.chains
            assert hpstage.open(folder).plan.restored
    assert found[0] == found[1]


def test_only_the_first_of_several_running_drivers_writes_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "LEAST", 1)
    monkeypatch.setattr(snapshots, "GROWTH", 0.0)
    store = MemoryJournal()
    studies = [Study(name, store, set()) for name in ("first", "second")]
    wrote: list[str] = []

    class Writer(SnapshotWriter):
        def __init__(self, study: Study) -> None:
            super().__init__(store, study.plan)
            self.name = study.name

        def write_if_due(self) -> None:
            wrote.append(self.name)
            super().write_if_due()

    for study in studies:
        study.driver.snapshots = Writer(study)
        study.ask([TrialAdded(TrialId("0"), {"a": s.constant(len(wrote))}, 8)], [8])
    while not all(study.done for study in studies):
        for study in studies:
            study.turn()
    assert set(wrote) == {"first"} and store.read_snapshot() is not None
    for study in studies:
        study.driver.leave()
        study.driver.write_snapshot()
        study.driver.snapshots.close()
    assert wrote[-2:] == ["first", "second"]
    assert open_plan(store, WORKLOAD, {}).restored == len(store)


KILLED = """
import itertools, os, signal, sys, types
from hpstage.driver import snapshots
from hpstage.store import sqlite
from tests.unit.driver import test_snapshots
snapshots.LEAST, snapshots.GROWTH = 1, 0.0
written = itertools.count()
def replace_or_die(source, target):
    if str(target).endswith("-snapshot") and next(written) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    os.replace(source, target)
sqlite.os = types.SimpleNamespace(**{**vars(os), "replace": replace_or_die})
test_snapshots.optimize(sys.argv[1], n_trials=1000)
"""


@pytest.mark.ci
def test_a_store_stays_usable_after_a_driver_is_killed_while_it_writes_a_snapshot(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder)], cwd=Path(__file__).parents[3])
    assert done.returncode == -signal.SIGKILL
    with closing(SQLiteJournal(folder / "plan.sqlite")) as journal:
        opened = open_existing_plan(journal)
        assert 0 < opened.restored <= opened.position == len(journal)
        validate(opened)
    result = optimize(folder, n_trials=12, name="next")
    assert len(result.study.trials) == 12
    validate(result.plan)
