"""All figures of a journal, as JSON: those of each study and of the plan."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import xxhash

from hpstage.accounting.account import new_account
from hpstage.accounting.book import Book
from hpstage.accounting.causes import causes_of
from hpstage.accounting.failures import failures_of
from hpstage.accounting.studies import study_rows
from hpstage.accounting.tables import Table, stages, states, trials, workers
from hpstage.cli.status import status_of
from hpstage.cluster.dashboard.board import Board
from hpstage.cluster.dashboard.metrics import _families, _Sheet
from hpstage.store import MemoryJournal


def figures_of(journal: MemoryJournal) -> dict[str, Any]:
    account = new_account(journal)
    account.catch_up(journal)
    book = Book(account)
    found = {
        "status": msgspec.to_builtins(status_of(account, journal).plan),
        "studies": [msgspec.to_builtins(row) for row in study_rows(book, lambda study: True)],
        "metrics": metrics_of(journal),
        "books": {study or "": figures_of_book(Book(account, study)) for study in (None, *book.studies)},
    }
    return json.loads(json.dumps(found))  # as it is read again


def figures_of_book(book: Book) -> dict[str, Any]:
    causes = causes_of(book)
    return {
        "savings": book.savings.as_dict(),
        "causes": {name: getattr(causes, name) for name in causes.__dataclass_fields__},
        "tables": {table.__name__: figures_of_table(table(book)) for table in (trials, stages, states, workers)},
        "failures": [[fact.node, fact.step, *trials] for fact, trials in failures_of(book)],
        "best": book.best,
        "front": book.front,
    }


def figures_of_table(table: Table) -> dict[str, Any]:
    """Return the sums of the seconds and steps of a table, and a digest of all of it."""
    sums = {
        name: sum(value for value in values if isinstance(value, int | float))
        for name, values in table.columns.items()
        if "seconds" in name or "steps" in name
    }
    columns = {name: list(values) for name, values in table.columns.items()}
    return {"rows": len(table), "sums": sums, "digest": xxhash.xxh3_64_hexdigest(json.dumps(columns).encode())}


def metrics_of(journal: MemoryJournal) -> dict[str, float]:
    """Return what Prometheus would be given."""
    board = Board()
    board.offer("plan", 0, journal.read())
    [view] = board.plans.values()
    assert not view.problem, view.problem
    sheet = _Sheet()
    sheet.plan("plan", view)
    for study in view.studies.values():
        sheet.study("plan", view, study, len(view.workers().get(study.name, ())), 0)
    assert sheet.families.keys() == _families().keys()
    return {
        f"{sample.name} {' '.join(sample.labels.values())}": sample.value
        for family in sheet.families.values()
        for sample in family.samples
    }
