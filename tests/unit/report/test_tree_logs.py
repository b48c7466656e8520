"""What branches have logged and printed, in the tree's drawer and from the command line."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

import optuna
import pytest
from typer.testing import CliRunner

import hpstage
from hpstage import schedule as s
from hpstage.accounting.tables import cell
from hpstage.cli.app import app
from hpstage.errors import UsageError
from hpstage.report import open_book
from hpstage.report.names import plain
from hpstage.report.tree import book_rows
from hpstage.schedule import Scalar
from tests.unit.report.test_tree_embed import HOSTILE

STEPS, DROP = 60, 20


class Talking:
    """Logs under hostile names and prints hostile lines; two of three trials share their first steps."""

    version = "1"

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        self.total = 0.0

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        self.total += float(hp["rate"])  # type: ignore[arg-type]
        hpstage.log(HOSTILE, self.total)
        hpstage.log("step", -step)
        hpstage.log("sometimes", math.nan if step % 2 else 1.0)
        print(HOSTILE, f"\x1b[31m{step}")  # noqa: T201  what users do

    def evaluate(self) -> dict[str, float]:
        return {"total": self.total}

    def state_dict(self) -> object:
        return self.total

    def load_state_dict(self, state: float) -> None:
        self.total = state


def space(trial: optuna.Trial) -> dict[str, object]:
    return {"rate": s.multistep(1.0, milestones=[DROP], gamma=trial.suggest_categorical("gamma", [0.25, 0.5, 0.75]))}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("talking")
    study = optuna.create_study(study_name="talk", sampler=optuna.samplers.GridSampler({"gamma": [0.25, 0.5, 0.75]}))
    hpstage.optimize(
        study,
        Talking(),
        space,
        metric="total",
        steps=STEPS,
        n_trials=3,
        executor=hpstage.InlineExecutor(),
        store=folder,
    )
    return folder


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_each_branch_shows_the_logged_values_and_the_output_of_its_steps(store: Path) -> None:
    book = open_book(store)
    rows, branches = book_rows.logs_of(book), list(book.branches.values())
    assert sorted(rows) == list(range(len(branches)))
    for index, row in rows.items():
        branch = branches[index]
        steps = [step for step, _ in row.curves[plain(HOSTILE, 80)]]
        assert (steps[0], steps[-1]) == (branch.node.start, branch.reach - 1)
        assert len(steps) <= 24
        assert all(value == 1.0 for _, value in row.curves["sometimes"])
        assert row.output.count(HOSTILE) == branch.reach - branch.node.start or len(row.output) == 4000


@pytest.mark.ci
def test_printed_output_cannot_inject_html_into_the_stage_tree_page(store: Path) -> None:
    pytest.importorskip("bokeh")
    from hpstage.report.tree.embed import tree_page

    page = tree_page(open_book(store))
    assert "window.harmed" in page  # as data
    assert HOSTILE not in page and "<script>window.harmed" not in page and "<img src=x" not in page


def test_the_stage_tree_page_limits_the_number_of_characters_of_logs(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book_rows, "_CHARACTERS", 1)
    assert len(book_rows.logs_of(open_book(store))) == 1


def test_the_logs_command_prints_the_output_of_all_stages_without_escape_sequences(store: Path) -> None:
    printed = run("logs", store, "--trial", "1")
    lines = printed.splitlines()
    assert [line.rpartition("[31m")[2] for line in lines[:STEPS]] == [str(step) for step in range(STEPS)]
    assert "\x1b" not in printed
    assert "60 values from step 0 (1) to step 59" in lines[STEPS]


def test_the_logs_command_prints_a_curve_as_a_table_or_as_csv(store: Path) -> None:
    lines = run("logs", store, "--trial", "talk/1", "--name", "sometimes").splitlines()
    assert lines[0].split() == ["step", "sometimes"]
    assert [line.split() for line in lines[1:]] == [[str(step), "nan" if step % 2 else "1"] for step in range(STEPS)]
    lines = run("logs", store, "--trial", "talk/1", "--name", "step").splitlines()
    assert [line.split() for line in lines[1:3]] == [["0", "0"], ["1", "-1"]]
    rows = list(csv.reader(run("logs", store, "--trial", "1", "--csv").splitlines()))
    assert rows[0] == ["step", cell(HOSTILE), "sometimes", "step (logged)"]
    log = hpstage.open(store).trial(1).log()
    assert {int(step): float(value) for step, value, *_ in rows[1:]} == log.values[HOSTILE]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trial", "9"], "has no trial 'talk/9'"),
        (["--trial", "x"], "has no trial 'talk/x'"),
        (["--trial", "1", "--study", "other"], "this plan has no study 'other'; there are: talk"),
        (["--trial", "1", "--name", "loss"], "trial talk/1 has logged nothing as 'loss'; it has logged: "),
    ],
)
def test_the_logs_command_names_an_unknown_trial_study_or_series(
    store: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        run("logs", store, *arguments)


def test_gc_removes_logs_that_the_plan_does_not_record(store: Path) -> None:
    from hpstage.checkpoints.stage_log import StageLog
    from hpstage.plan.facts import StateKey

    plan = hpstage.open(store)
    before = plan.checkpoints.logs()
    unnamed = StateKey("f" * 32)
    plan.checkpoints.save_log(unnamed, StageLog(0, 1, output="x"))
    assert "would be removed: 1 log not recorded in the plan" in run("gc", store, "--dry-run")
    assert unnamed in plan.checkpoints.logs()
    run("gc", store, "--budget", "0")
    assert plan.checkpoints.logs() == before
