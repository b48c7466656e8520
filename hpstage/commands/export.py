"""``hpstage export``: the data frames of a plan as files."""

from __future__ import annotations

import os
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hpstage.commands.terminal import clean, count_of, echo
from hpstage.errors import UsageError


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
    notebook, and says what their columns mean.

    Examples:

    \b
    hpstage export .hpstage/Digits-1f2e3d4c5b6a tables
    hpstage export "redis://head:6379?prefix=NAME" tables --format csv
    """
    from hpstage.report.frames import frames

    if format == Format.PARQUET:
        _check_pyarrow()
    found = frames(store)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (field.name for field in fields(found)):
            frame, path = getattr(found, name), folder / f"{name}.{format.value}"
            aside = path.with_name(f".{path.name}-{os.getpid()}")
            try:
                if format == Format.PARQUET:
                    frame.to_parquet(aside, index=False)
                else:
                    frame.to_csv(aside, index=False)
                aside.replace(path)
            finally:
                aside.unlink(missing_ok=True)
            echo(f"{clean(path)}  {count_of(len(frame), 'row')}")
    except OSError as error:
        raise UsageError(f"cannot write to {clean(folder)}: {error.strerror or error}; give another folder") from error


def _check_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401  only whether it is there
    except ImportError:
        raise UsageError('parquet needs pyarrow: pip install "hpstage[report]", or give --format csv') from None
