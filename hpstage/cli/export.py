"""``hpstage export`` and ``report``: write the tables of a plan, the weights of a model, or the report to files."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpstage.accounting.book import open_book
from hpstage.accounting.tables import events, tables_of
from hpstage.cli import options
from hpstage.cli.terminal import echo
from hpstage.errors import UsageError
from hpstage.errors.text import clean, count_of, shortened
from hpstage.plan.facts import Fact
from hpstage.report import write_report
from hpstage.report.files import refusing, replacing
from hpstage.report.frames import frame_of
from hpstage.report.trackers import not_installed
from hpstage.store.redaction import redacted

if TYPE_CHECKING:
    from hpstage.report.trackers.runs import Tracker


class What(StrEnum):
    TABLES = "tables"
    WEIGHTS = "weights"
    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"
    WANDB = "wandb"


class Format(StrEnum):
    PARQUET = "parquet"
    CSV = "csv"


def export(
    store: options.Store,
    what: Annotated[
        What,
        typer.Argument(
            metavar="WHAT",
            help="The store as tables, the weights of a model, or the trials as runs of a tracker.",
        ),
    ],
    target: Annotated[
        Path | None,
        typer.Argument(
            metavar="TARGET", help="File for weights; folder for all others.", show_default="named after WHAT"
        ),
    ] = None,
    format: Annotated[Format | None, typer.Option(help="File format of tables.", show_default="parquet")] = None,
    trial: Annotated[
        str | None,
        typer.Option(
            help="Trial to export the weights of: STUDY/NUMBER, or a number.",
            show_default="the best trial of the study",
        ),
    ] = None,
    study: options.StudyOfNumber = None,
    step: Annotated[
        str | None,
        typer.Option(
            help="Step after which to take the weights: a number, or best.", show_default="the last evaluated step"
        ),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(help="Part of the state to export, such as self.ema for averaged weights.", show_default="model"),
    ] = None,
    checkpoints: options.KeptCheckpoints = None,
) -> None:
    """Write tables, weights, or the runs of a tracker. There are tables of trials, stages, states, workers and events.
    Weights are those of a trained model. Trackers are TensorBoard, MLflow and Weights & Biases: each trial is a run.

    Files of an earlier export are replaced. The store is not changed. In Python, hpstage.report.frames returns the same
    tables, and hpstage.accounting.tables documents their columns. Weights are written as a safetensors file with the
    names of the model's state_dict; in Python, hpstage.open(STORE) returns them.

    A run has the trial's parameters, and its metrics and logged values (hpstage logs) by step. TensorBoard's event
    files are in one folder per trial. MLflow's runs are in TARGET/mlflow.db (mlflow ui --backend-store-uri
    sqlite:///TARGET/mlflow.db); without TARGET, on the server of MLFLOW_TRACKING_URI, if that is set. Runs of Weights &
    Biases are offline: wandb sync TARGET/wandb/offline-run-* uploads them.

    Examples:

    \b
    hpstage export .hpstage/Digits-1f2e3d4c5b6a tables
    hpstage export "redis://head:6379?prefix=NAME" tables FOLDER --format csv
    hpstage export STORE weights --trial digits/6 best.safetensors
    hpstage export STORE tensorboard
    """
    if what != What.TABLES and format is not None:
        raise UsageError(f"--format {format.value} is for tables; leave it out for {what.value}")
    if what == What.TABLES and checkpoints is not None:
        raise UsageError(f"--checkpoints {checkpoints} is for weights and trackers; leave it out for tables")
    for option, value in (("--trial", trial), ("--study", study), ("--step", step), ("--part", part)):
        if what != What.WEIGHTS and value is not None:
            raise UsageError(f"{option} {value} is for weights; leave it out for {what.value}")
    if what in _TRACKERS:
        _export_runs(store, checkpoints, what, target)
    elif what == What.WEIGHTS:
        _export_weights(store, checkpoints, target or Path("weights.safetensors"), trial, study, step, part)
    else:
        _export_tables(store, target or Path("tables"), format or Format.PARQUET)


_TRACKERS = (What.TENSORBOARD, What.MLFLOW, What.WANDB)


def _export_runs(store: str, checkpoints: str | None, what: What, folder: Path | None) -> None:
    from hpstage.report.trackers.runs import exported, runs_of
    from hpstage.search.results import open as open_store

    if folder is None and not (what == What.MLFLOW and os.environ.get("MLFLOW_TRACKING_URI")):
        folder = Path(what.value)
    plan = open_store(store, checkpoints=checkpoints)
    count = values = 0
    try:
        with refusing(folder, another="folder"):
            for run in exported(runs_of(plan.plan, plan.checkpoints), _tracker(what, folder)):
                count += 1
                values += sum(len(row) for _, row in run.rows)
    except ImportError as error:
        raise not_installed(error, what.value) from None
    where = os.environ["MLFLOW_TRACKING_URI"] if folder is None else clean(folder)
    echo(f"{redacted(where, where)}  {count_of(count, 'trial')}, {count_of(values, 'value')}")


def _tracker(what: What, folder: Path | None) -> Tracker:
    if what == What.MLFLOW:
        from hpstage.report.trackers.mlflow import MLflow

        return MLflow(folder)
    assert folder is not None
    if what == What.TENSORBOARD:
        from hpstage.report.trackers.tensorboard import TensorBoard

        return TensorBoard(folder)
    from hpstage.report.trackers.wandb import WeightsAndBiases

    return WeightsAndBiases(folder, {"mode": "offline"})


def _export_weights(
    store: str,
    checkpoints: str | None,
    path: Path,
    trial: str | None,
    study: str | None,
    step: str | None,
    part: str | None,
) -> None:
    if step is not None and step != "best" and not step.isdecimal():
        raise UsageError(f"--step {step}: give a number of steps, or best")
    from hpstage.search.results import open as open_store

    plan = open_store(store, checkpoints=checkpoints)
    found = plan.best_trial(study) if trial is None else plan.trial(trial, study)
    at = found.step("best" if step == "best" else None if step is None else int(step))
    with refusing(path):
        found.save_weights(path, at, part=part)
    values = ", ".join(f"{clean(name)} {shortened(value)}" for name, value in found.metrics.get(at, {}).items())
    echo(f"{clean(path)}  trial {clean(found.id)} after step {at:,}{f': {values}' if values else ''}")


def _export_tables(store: str, folder: Path, format: Format) -> None:
    if format == Format.PARQUET:
        _check_installed()
    facts: list[Fact] = []
    book = open_book(store, seen=facts.append)
    tables = {**tables_of(book), "events": events(facts)}
    with refusing(folder, another="folder"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in tables.items():
            path = folder / f"{name}.{format.value}"
            with replacing(path) as aside:
                if format == Format.CSV:
                    table.write_csv(aside)
                else:
                    frame_of(table).to_parquet(aside, index=False)
            echo(f"{clean(path)}  {count_of(len(table), 'row')}")


def _check_installed() -> None:
    try:
        import pandas  # noqa: F401  only to see whether it is installed
        import pyarrow  # noqa: F401
    except ImportError:
        raise UsageError(
            'parquet needs pandas and pyarrow: pip install "hpstage[report]", or give --format csv'
        ) from None


_FOLDER = Path("hpstage-report")


def report(
    store: options.Store,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of the report; created if needed.")
    ] = _FOLDER,
    study: Annotated[
        str | None, typer.Option(help="Report only this study.", show_default="all studies of the store")
    ] = None,
    tables: Annotated[bool, typer.Option("--tables", help="Also write the report's tables, as CSV files.")] = False,
) -> None:
    """Write the report of a store. It is a page with pictures; with --tables, also CSV files.

    It needs only the store, from any host that reaches it, and does not change it. Searches may be running: the report
    then shows what they have done so far. Files of an earlier report are replaced. The path of the page is printed.

    Examples:

    \b
    hpstage report .hpstage/Digits-1f2e3d4c5b6a
    hpstage report STORE reports/digits --study digits --tables
    hpstage report "redis://head:6379?prefix=NAME"
    """
    echo(clean(write_report(folder, store, study=study, tables=tables)))
