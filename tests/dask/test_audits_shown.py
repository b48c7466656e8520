"""Result, savings, report, status and page show the same figures of audits. On simulated workers."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

import hpstage
from hpstage.accounting.account import new_account
from hpstage.accounting.audits import audited
from hpstage.cli.status import as_text, status_of
from hpstage.cluster.dashboard.board import Board
from hpstage.cluster.dashboard.tiles import standing
from hpstage.report import write_report
from hpstage.store import MemoryJournal
from tests.simulated_audits import AuditingExecutor


def search(journal: MemoryJournal, name: str, audit_seconds: float | None = 0.5) -> hpstage.Result:
    """Two trials, one of which is longer, and which no other search has."""

    def space(trial: optuna.Trial) -> dict[str, object]:
        return {"x": f"{name} {trial.number}", "steps": 40 if trial.number == 0 else 8}

    return hpstage.optimize(
        optuna.create_study(study_name=name),
        object(),
        space,
        metric="value",
        steps=40,
        n_trials=2,
        executor=AuditingExecutor(2, audit_seconds=audit_seconds),
        store=journal,
        checkpoint_every=4,
    )


@pytest.fixture
def journal() -> MemoryJournal:
    return MemoryJournal()


@pytest.fixture
def result(journal: MemoryJournal) -> hpstage.Result:
    return search(journal, "study")


@pytest.mark.ci
def test_every_output_shows_the_same_audit_line(result: hpstage.Result, journal: MemoryJournal, tmp_path: Path) -> None:
    figures, plan = result.audit.figures, result.plan
    assert figures.steps > 0
    line = audited(figures.share(plan), 0, figures.seconds)
    assert result.audit.line.startswith(f"{line}: ")
    assert dict(result.savings.rows())["audited"] == line
    account = new_account(journal)
    account.catch_up(journal)
    assert account.audits == figures
    status = status_of(account, journal)
    assert line in as_text(status)
    assert (status.plan.steps_audited, status.plan.audits) == (figures.steps, len(figures.found))
    assert result.audit.line in write_report(tmp_path, result).read_text()
    board = Board()
    board.offer("plan", 0, list(journal.read()))
    [shown] = board.studies()
    assert standing(shown)[-1] == f"audited {result.audit.line}"


def test_audits_of_a_second_search_are_added_to_those_of_the_first(
    result: hpstage.Result, journal: MemoryJournal
) -> None:
    before = result.audit.figures
    after = search(journal, "another").audit.figures
    assert after.found[: len(before.found)] == before.found
    assert len(after.found) > len(before.found)
    assert after.steps > before.steps


def test_status_and_savings_do_not_mention_audits_if_none_was_made(journal: MemoryJournal) -> None:
    result = search(journal, "study", None)
    account = new_account(journal)
    account.catch_up(journal)
    assert "audited" not in as_text(status_of(account, journal)) + str(result.savings)
