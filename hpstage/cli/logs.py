"""``hpstage logs``: shows the values that a trial has logged, and its printed output."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hpstage.cli import options
from hpstage.cli.terminal import echo
from hpstage.errors import UsageError
from hpstage.errors.text import clean, clean_lines, count_of, table
from hpstage.report.trial_log import TrialLog
from hpstage.search.results import open as open_store


def logs(
    store: options.Store,
    trial: options.Trial = None,
    study: options.StudyOfNumber = None,
    name: Annotated[
        list[str] | None, typer.Option(help="Print the values logged under this name, by step; may be repeated.")
    ] = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print the values of all names, or of those given by --name, as CSV.")
    ] = False,
    checkpoints: options.KeptCheckpoints = None,
) -> None:
    """Show what a trial has printed and logged while it trained.

    The log of a trial joins the logs of its stages, including stages that were trained for another trial. Only the end
    of each stage's printed output is kept. The store is not changed.

    Examples:

    \b
    hpstage logs .hpstage/Digits-1f2e3d4c5b6a --trial 6
    hpstage logs STORE --trial digits/6 --name train_loss
    hpstage logs STORE --trial 6 --csv > trial-6.csv
    """
    plan = open_store(store, checkpoints=checkpoints)
    found = plan.best_trial(study) if trial is None else plan.trial(trial, study)
    log = found.log()
    chosen = _chosen(log, name, found.id)
    if as_csv:
        chosen.table().write_to(sys.stdout)
    elif name:
        _show(chosen)
    else:
        _show_all(log, found.id)


def _chosen(log: TrialLog, names: list[str] | None, trial: str) -> TrialLog:
    if not names:
        return log
    for name in names:
        if name not in log.values:
            there = ", ".join(map(clean, log.values)) or "nothing"
            raise UsageError(f"trial {clean(trial)} has logged nothing as {clean(name)!r}; it has logged: {there}")
    return TrialLog({name: log.values[name] for name in names}, log.output)


def _show(log: TrialLog) -> None:
    columns = log.table().columns
    rows = [["" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else f"{cell:,}" for cell in row]
            for row in zip(*columns.values(), strict=True)]  # fmt: skip
    echo(table([[clean(column) for column in columns], *rows], left=0))


def _show_all(log: TrialLog, trial: str) -> None:
    if log.output:
        echo(clean_lines("\n".join(log.output.splitlines())))
    for name, values in log.values.items():
        steps = list(values)
        echo(
            f"{clean(name)}: {count_of(len(steps), 'value')} from step {steps[0]:,} ({values[steps[0]]:.6g}) to step "
            f"{steps[-1]:,} ({values[steps[-1]]:.6g}); --name {clean(name)} prints them"
        )
    if not (log.output or log.values):
        echo(f"Trial {clean(trial)} has printed and logged nothing; log values with hpstage.log(name, value).")
