"""``hpstage export``: the tables of a plan as files."""

from __future__ import annotations

from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpstage.cli.terminal import echo
from hpstage.errors import UsageError
from hpstage.plan.facts import Fact
from hpstage.report.book import open_book
from hpstage.report.files import replacing
from hpstage.report.tables import Table, events, stages, states, trials, workers
from hpstage.text import clean, count_of

if TYPE_CHECKING:
    import pandas as pd


class Format(StrEnum):
    PARQUET = "parquet"
    CSV = "csv"


def export(
    store: Annotated[str, typer.Argument(help="The plan: a folder, or redis://host:6379?prefix=NAME.")],
    folder: Annotated[Path, typer.Argument(help="Where the files go; made if needed.")],
    format: Annotated[Format, typer.Option(help="Of the files.")] = Format.PARQUET,
) -> None:
    """Write a plan as tables: trials, stages, states, workers and events.

    Files of an earlier export are replaced. The plan is not changed. hpstage.report.frames gives the same tables to a
    notebook; hpstage.report.tables says what their columns mean.

    Examples:

    \b
    hpstage export .hpstage/Digits-1f2e3d4c5b6a tables
    hpstage export "redis://head:6379?prefix=NAME" tables --format csv
    """
    if format == Format.PARQUET:
        _check_installed()
    tables = _frames(store) if format == Format.PARQUET else _tables(store)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in tables.items():
            path = folder / f"{name}.{format.value}"
            with replacing(path) as aside:
                if isinstance(table, Table):
                    table.write_csv(aside)
                else:
                    table.to_parquet(aside, index=False)
            echo(f"{clean(path)}  {count_of(len(table), 'row')}")
    except OSError as error:
        raise UsageError(f"cannot write to {clean(folder)}: {error.strerror or error}; give another folder") from error


def _tables(store: str) -> dict[str, Table]:
    facts: list[Fact] = []
    book = open_book(store, seen=facts.append)
    found = {table.__name__: table(book) for table in (trials, stages, states, workers)}
    return {**found, "events": events(facts)}


def _frames(store: str) -> dict[str, pd.DataFrame]:
    from hpstage.report.frames import frames

    found = frames(store)
    return {field.name: getattr(found, field.name) for field in fields(found)}


def _check_installed() -> None:
    try:
        import pandas  # noqa: F401  only whether it is there
        import pyarrow  # noqa: F401
    except ImportError:
        raise UsageError(
            'parquet needs pandas and pyarrow: pip install "hpstage[report]", or give --format csv'
        ) from None
