"""Writes facts into stores, and runs commands on these."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
from click.testing import Result as Outcome
from typer.testing import CliRunner

from hpstage.cli.app import app
from hpstage.plan.facts import DriverId, Fact, TargetAsked, TrialAdded
from hpstage.plan.log import open_plan
from hpstage.store import Journal, SQLiteJournal
from tests.unit.searches import WORKLOAD


def write(journal: Journal, facts: Sequence[Fact]) -> None:
    open_plan(journal, WORKLOAD, {})
    journal.append([msgspec.json.encode(fact) for fact in facts])


def write_in(folder: Path, facts: Sequence[Fact]) -> None:
    with closing(SQLiteJournal(folder / "plan.sqlite")) as journal:
        write(journal, facts)


def ask(trials: Sequence[TrialAdded], driver: str = "") -> list[Fact]:
    return [*trials, *(TargetAsked(added.trial, added.steps, DriverId(driver)) for added in trials)]


def run(*words: object) -> Outcome:
    return CliRunner().invoke(app, [str(word) for word in words])


def output_of(*words: object) -> str:
    done = run(*words)
    assert done.exit_code == 0, done.output
    return done.output
