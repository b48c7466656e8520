"""``hpstage report``: the report of a plan, from its store alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpstage.cli import options
from hpstage.cli.terminal import echo
from hpstage.errors.text import clean
from hpstage.report import write_report

_FOLDER = Path("hpstage-report")


def report(
    store: options.Store,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of the report; created if needed.")
    ] = _FOLDER,
    study: Annotated[str | None, typer.Option(help="Report this study only; else all of the plan.")] = None,
    tables: Annotated[bool, typer.Option("--tables", help="Write its tables, too, as CSV files.")] = False,
) -> None:
    """Write the report of a store. It is a page with its pictures, and with --tables its CSV files.

    It reads the store alone, from any host that reaches it, and changes nothing: searches may run at the same time, and
    the report is of what they have done so far. Files of an earlier report are replaced. It prints where the page is.

    Examples:

    \b
    hpstage report .hpstage/Digits-1f2e3d4c5b6a
    hpstage report STORE reports/digits --study digits --tables
    hpstage report "redis://head:6379?prefix=NAME"
    """
    echo(clean(write_report(folder, store, study=study, tables=tables)))
