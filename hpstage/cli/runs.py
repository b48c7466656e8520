"""``hpstage runs``: shows the trials of a store as a table."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Annotated

import typer

from hpstage.accounting.studies import RunRow, run_rows
from hpstage.cli.terminal import columns, echo
from hpstage.errors import UsageError
from hpstage.errors.text import clean, duration, shortened, size, table
from hpstage.plan.log import open_existing_plan
from hpstage.store.opening import DEFAULT_ROOT, default_stores, open_journal

_LINES = 40


def runs(
    store: Annotated[
        str | None,
        typer.Argument(
            metavar="STORE",
            help="The store: a folder, or redis://host:6379?prefix=NAME.",
            show_default="all in .hpstage",
        ),
    ] = None,
    study: Annotated[str | None, typer.Option(help="Show only trials of this study.")] = None,
    lines: Annotated[int, typer.Option(min=1, help="Maximum number of trials to show; the newest are shown.")] = _LINES,
) -> None:
    """Show the trials of a store. These are trials of searches, and single runs; each can be branched.

    Each line shows a trial: which one it branches from, the steps trained, the best value and its step, the time
    since the trial ended or was last trained, the number of its branches, and the bytes of its checkpoints. Trials may
    share checkpoints.

    Examples:

    \b
    hpstage runs
    hpstage runs .hpstage/Digits-1f2e3d4c5b6a --study runs
    """
    stores = [store] if store is not None else list(map(str, default_stores()))
    if not stores:
        raise UsageError(f"there is no store in {DEFAULT_ROOT}; give STORE, or begin with hpstage train")
    for number, place in enumerate(stores):
        with ExitStack() as closing:
            plan = open_existing_plan(open_journal(place, closing=closing, read_only=True))
            rows = [row for row in run_rows(plan) if study is None or plan.study_of(row.trial) == study]
        if len(stores) > 1:
            echo(f"{'' if number == 0 else chr(10)}{clean(place)}")
        if not rows:
            echo("no trials")
            continue
        titles = ("trial", "branch of", "steps", "best", "age", "branches", "bytes")
        echo(table([titles, *(_cells(row, time.time()) for row in rows[-lines:])], left=2, width=columns()))
        if len(rows) > lines:
            echo(f"... and {len(rows) - lines:,} earlier (--lines shows more)")


def _cells(row: RunRow, now: float) -> tuple[str, ...]:
    return (
        clean(row.trial),
        clean(row.branch_of or ""),
        f"{row.steps:,}" if row.trained == row.steps else f"{row.trained:,} of {row.steps:,}",
        "-" if row.best is None else f"{clean(row.best[0])} {shortened(row.best[1])} at {row.best[2]:,}",
        "-" if row.at is None else duration(max(0.0, now - row.at)),
        str(row.branches or "-"),
        size(row.bytes),
    )
