"""``hpstage report``: the report of a plan, from its store alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hpstage.commands.terminal import clean, echo
from hpstage.report.account import keep
from hpstage.report.book import open_book

_FOLDER = Path("hpstage-report")
# Processes, this one among them: on a plan of 100,000 stages two take some 0.9 GiB together.
_MOST = 2


def report(
    store: Annotated[str, typer.Argument(help="The plan: a folder, or redis://host:6379?prefix=NAME.")],
    folder: Annotated[Path, typer.Argument(help="Where the report goes; made if needed.")] = _FOLDER,
    study: Annotated[str | None, typer.Option(help="Report this study only; else all of the plan.")] = None,
    tables: Annotated[bool, typer.Option("--tables", help="Write the rows behind it, too, as CSV files.")] = False,
) -> None:
    """Write the report of a plan: a page with its pictures, and with --tables the rows behind them.

    It reads the store alone, from any host that reaches it, and changes nothing: searches may run meanwhile, and the
    report is of what they have done so far. Files of an earlier report are replaced. It prints where the page is.

    Examples:

    \b
    hpstage report .hpstage/Digits-1f2e3d4c5b6a
    hpstage report STORE reports/digits --study digits --tables
    hpstage report "redis://head:6379?prefix=NAME"
    """
    from hpstage.report.writing import write_book

    book = open_book(store, study)
    keep(book)
    echo(clean(write_book(folder, book, tables=tables, processes=_processes())))


def _processes() -> int:
    """How many may draw and write at a time: one where this process cannot be forked, or has threads already."""
    threads = Path("/proc/self/task")
    if not threads.is_dir() or len(list(threads.iterdir())) > 1:
        return 1
    return min(_MOST, os.cpu_count() or 1)
