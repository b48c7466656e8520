"""Trials that the space has rejected are shown: nothing was trained of them, but the study has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpstage.accounting.account import Account, new_account
from hpstage.accounting.book import Book
from hpstage.accounting.studies import study_rows
from hpstage.accounting.tables import trials
from hpstage.cli.status import as_text, status_of
from hpstage.cli.tree import draw
from hpstage.cluster.dashboard.board import Board, Shown
from hpstage.cluster.dashboard.tiles import tiles
from hpstage.report.page import write_book
from hpstage.report.tree.book_rows import rows_of
from tests.unit.accounting.record import recorded


@pytest.fixture(scope="module")
def account() -> Account:
    journal = recorded("rejections")
    found = new_account(journal)
    found.catch_up(journal)
    return found


def test_status_counts_trials_that_the_space_prunes_as_rejected(account: Account) -> None:
    (row,) = study_rows(Book(account), lambda study: False)
    rejected = 10 - len(account.plan.trials)
    assert rejected > 0 and row.trials == {"COMPLETE": 10 - rejected, "REJECTED": rejected}
    assert f"complete, {rejected} rejected" in as_text(status_of(account, recorded("rejections")))


def test_the_trials_table_has_the_reason_why_the_space_rejected_a_trial(account: Account) -> None:
    table = trials(Book(account))
    rows = zip(table.columns["state"], table.columns["steps"], table.columns["rejected"], strict=True)
    rejected = [row for row in rows if row[0] != "COMPLETE"]
    assert set(rejected) == {("REJECTED", 0, "optuna.exceptions.TrialPruned: too deep")}
    assert len(table) == 10 and table.columns["params_layers"].count(3) == len(rejected)


@pytest.mark.ci
def test_report_and_tree_show_trials_rejected_by_the_space(account: Account, tmp_path: Path) -> None:
    book = Book(account)
    page = write_book(tmp_path, book).read_text()
    numbers = [str(fact.number) for fact in book.rejected.values()]
    assert "Rejected by the space" in page and f"trials {', '.join(numbers)}" in page
    assert [row.state for row in rows_of(book).trials.values()].count("rejected") == len(numbers)
    drawn = draw(book, depth=None, lines=100, width=None)
    assert f"{len(numbers)} trials rejected by the space" in str(getattr(drawn, "renderables", [""])[-1])


def test_the_dashboard_counts_trials_rejected_by_the_space() -> None:
    board = Board()
    board.offer("plan", 0, recorded("rejections").read())
    [view] = board.plans.values()
    count = 10 - len(view.plan.trials)
    finished, *_ = tiles(Shown("plan", view, view.studies["study"]))
    assert f"{count} rejected" in finished.details
