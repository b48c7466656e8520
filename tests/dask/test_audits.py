"""Idle workers of a Dask cluster audit while another one trains."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
from distributed import Client

import hpstage
from hpstage.checkpoints import FolderCheckpoints
from hpstage.cluster import DaskExecutor
from hpstage.errors import StateError
from hpstage.plan.facts import Audited, StateDiffers
from hpstage.plan.log import open_existing_plan, read_facts
from hpstage.plan.messages import Audit, AuditId, Compared, Segment
from hpstage.schedule import Scalar
from hpstage.store import MemoryJournal
from hpstage.testing.chains import key, stage, until, workers
from hpstage.testing.executor_case import ENDLESS, audits_ended
from hpstage.testing.toys import Counter, Gate


class Inexact(Counter):
    """Adds what another process does not."""

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        super().train(step, hp)
        self.total += os.getpid()


class Deterministic(Counter):
    """Reports nothing that is another process's own."""

    def evaluate(self) -> dict[str, float]:
        return {"total": self.total}


def space(trial: optuna.Trial) -> dict[str, object]:
    """One trial is long, and held at the gate; the worker of the other one is idle then."""
    return {"x": 1.0 + trial.number, "steps": 20 if trial.number == 0 else 4}


def audits_in(journal: MemoryJournal) -> list[Audited]:
    return [fact for fact in read_facts(journal) if isinstance(fact, Audited)]


def search(trainable: Counter, gate: Gate, journal: MemoryJournal) -> hpstage.Result:
    """Search, and hold the long trial until an audit has come to its end."""
    gate.shut(16)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            if any(fact.outcome != "stopped" for fact in audits_in(journal)):
                break
        gate.open()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        return hpstage.optimize(
            optuna.create_study(direction="maximize"),
            trainable,
            space,
            metric="total",
            steps=20,
            n_trials=2,
            executor=DaskExecutor(n_workers=2),
            store=journal,
            checkpoint_every=4,
            verify="off",
        )
    finally:
        over.set()
        watching.join()


@pytest.mark.ci
@pytest.mark.usefixtures("nothing_ahead")
def test_an_idle_worker_audits_kept_training_and_the_result_reports_the_audit(tmp_path: Path) -> None:
    gate, journal = Gate(tmp_path), MemoryJournal()
    result = search(Counter(gate), gate, journal)
    first, *_ = [fact for fact in audits_in(journal) if fact.outcome != "stopped"]
    assert (first.of, first.outcome, first.compared) == ("segment", "equal", 1), first
    assert first.step - first.start == 4
    figures = result.audit.figures
    assert figures.steps >= 4 and figures.differences == 0 and not figures.failed
    assert figures.seconds >= first.seconds > 0
    assert "0 differences" in result.audit.line
    assert result.savings.audit_seconds == figures.seconds
    assert result.savings.steps_trained == 24, "audits are the work of no trial"
    assert ("audited", "% of the steps") in [
        (name, text.partition(" ")[2].partition(" in ")[0]) for name, text in result.savings.rows()
    ]


@pytest.mark.ci
@pytest.mark.usefixtures("nothing_ahead")
def test_a_difference_found_by_an_audit_ends_the_search_and_names_both_trainings(tmp_path: Path) -> None:
    gate, journal = Gate(tmp_path), MemoryJournal()
    with pytest.raises(StateError, match=r"First trained from .* in a fresh process by an audit on worker inproc://"):
        search(Inexact(gate), gate, journal)
    [differs] = [fact for fact in read_facts(journal) if isinstance(fact, StateDiffers)]
    assert differs.where is not None and "total" in differs.where
    assert open_existing_plan(journal).differences == [differs], "by which later calls are refused"


@pytest.mark.ci
@pytest.mark.parametrize("audit", ["off", "winner"])
@pytest.mark.usefixtures("nothing_ahead")
def test_idle_workers_make_no_audits_with_audit_off_or_winner(audit: Any, tmp_path: Path) -> None:
    gate, journal = Gate(tmp_path), MemoryJournal()
    gate.open()
    hpstage.optimize(
        optuna.create_study(direction="maximize"),
        Deterministic(gate),
        space,
        metric="total",
        steps=20,
        n_trials=2,
        executor=DaskExecutor(n_workers=2),
        store=journal,
        audit=audit,
    )
    assert [fact for fact in audits_in(journal) if fact.of != "winner"] == []


def run_while(file: Path) -> None:
    while file.exists():
        time.sleep(0.01)


@pytest.mark.ci
def test_an_audit_stops_when_another_dask_task_arrives_on_its_worker(client: Client, tmp_path: Path) -> None:
    executor = DaskExecutor(client)
    executor.open(Counter(), FolderCheckpoints(tmp_path, "w"))
    try:
        worker, *_ = workers(executor, 2)
        goal = Compared(ENDLESS, key(ENDLESS), "0" * 32)
        segment = Segment(initial={"x": 1.0}, stages=(stage(0, ENDLESS),), stop=ENDLESS, compared=(goal,))
        executor.audit(worker, Audit(AuditId("a"), segment))
        running = tmp_path / "running"
        running.touch()
        other = client.submit(run_while, running, workers=[worker], allow_other_workers=False, pure=False)
        [end] = audits_ended(until(executor, lambda reports: bool(audits_ended(reports))))
        assert (end.audit, end.outcome) == ("a", "stopped")
        running.unlink()
        other.result()
    finally:
        executor.close()
