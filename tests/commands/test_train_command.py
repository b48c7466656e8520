"""hpstage train, branch and runs; and what --set reads, none of which is executed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result as Outcome
from typer.testing import CliRunner

import hpstage
from hpstage import schedule as s
from hpstage.cli.app import app, main
from hpstage.errors import UsageError
from hpstage.schedule.assignments import values_of

SCRIPT = """
from hpstage.testing.toys import Tape

class Shown(Tape):
    def evaluate(self):
        return {"score": self.score}

class Needing(Shown):
    def train(self, step, hp):
        hp["wd"]

def function(run):
    run.attach(tape=Shown())
    for step in run.steps():
        run.report(score=1.0)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("taped.py").write_text(SCRIPT)
    return "taped.py:Shown"


def invoke(*words: object) -> Outcome:
    inline = ["--executor", "InlineExecutor()", "--quiet"] if words[0] in ("train", "branch") else []
    return CliRunner().invoke(app, [*map(str, words), *inline])


def lines(*words: object) -> list[str]:
    done = invoke(*words)
    assert done.exit_code == 0, (done.output, done.exception)
    return [line.rstrip() for line in done.output.splitlines()]


@pytest.mark.ci
def test_train_branch_and_runs_work_together_on_one_store(script: str) -> None:
    run = ["train", script, "store", "--set", "lr=cosine(0.1, 8)", "--set", "wd=0.25", "--steps", 8]
    assert re.fullmatch(r"runs/0  score [\d.]+ after 8 of 8 steps", lines(*run)[0])
    assert lines(*run)[-1] == "store  store"
    branch = ["branch", "store", script, "--trial", 0, "--at", 4, "--set", "lr=[0.03,0.01]", "--steps", 10]
    assert [line.split()[0] for line in lines(*branch)] == ["runs/1", "runs/2", "store"]
    plan = hpstage.open("store")
    assert plan.trials == ["runs/0", "runs/1", "runs/2"]
    assert plan.trial("runs/1").schedules["lr"] == s.cosine(0.1, 8).until(4).then(0.03).until(10)
    title, *rows = lines("runs", "store")
    assert title.split() == ["trial", "branch", "of", "steps", "best", "age", "branches", "bytes"]
    assert [row.split()[:2] for row in rows] == [["runs/0", "8"], ["runs/1", "runs/0"], ["runs/2", "runs/0"]]
    assert lines("runs", "store", "--lines", 1)[-1] == "... and 2 earlier (--lines shows more)"
    assert lines("runs", "store", "--study", "digits") == ["no trials"]


def test_train_without_a_store_creates_a_store_that_runs_and_status_read(script: str) -> None:
    run = lines("train", script, "--set", "lr=[0.1,0.2]", "--steps", 4)
    assert [line.split()[0] for line in run] == ["runs/0", "runs/1", "store"]
    assert "runs/1" in "\n".join(lines("runs"))
    assert any(line.startswith("runs ") for line in lines("status", run[-1].split()[1]))


@pytest.mark.ci
def test_branch_finds_the_trainable_by_its_name_in_the_plan(script: str) -> None:
    lines("train", script, "store", "--set", "lr=0.1", "--steps", 4)
    assert lines("branch", "store", "--trial", "runs/0", "--at", 4, "--steps", 6)[0].startswith("runs/1 ")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--at", "9", "--set", "lr=0.1"], "cannot be branched at step 9"),
        (["--at", "2", "--set", "rate=0.1"], "no hyperparameter 'rate'; it has lr"),
        (["--at", "2", "--set", "steps=9"], "'steps' is not a hyperparameter of trial runs/0; give a branch's length"),
        (["--at", "2"], "without a change"),
        (["--at", "2", "--set", "lr=cosine(0.1"], "cannot be read"),
    ],
)
def test_branch_refuses_invalid_steps_and_values_and_adds_no_trial(words: list[str], message: str, script: str) -> None:
    lines("train", script, "store", "--set", "lr=0.1", "--steps", 4)
    assert message in str(invoke("branch", "store", script, "--trial", "runs/0", *words).exception)
    assert hpstage.open("store").trials == ["runs/0"]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["branch", "store", "taped.py:Shown", "--trial", 0, "--at", 4, "--set", "lr=1"], "give --steps=5 or more"),
        (["branch", "store", "taped.py:Shown", "--trial", 0, "--at", 9, "--set", "lr=1"], "with --at=4 and --steps=9"),
        (
            ["train", "taped.py:Shown", "taped.py", "--set", "lr=1", "--steps", 4],
            "File exists; choose another as STORE",
        ),
        (
            ["train", "taped.py:Needing", "--set", "lr=1", "--steps", 4],
            "--set gives no hyperparameter 'wd'; it has 'lr'",
        ),
        (
            ["run", "taped.py:Shown", "taped.py:function", "--metric", "score"],
            "steps is missing; give --steps, the maximum number of steps of a trial",
        ),
        (["train", "taped.py:function", "--set", "lr=1", "--steps", 4], "; give --metric, a name that evaluate()"),
        (["train", "taped.py:Shown", "store", "--steps", 4], "there are no hyperparameters; give at least one, "),
        (["train", "taped.py:Shown", "store", "--set", "lr=[]", "--steps", 4], "lr is an empty list; give at least"),
    ],
)
def test_errors_of_commands_name_command_line_options_as_the_remedy(
    words: list[Any], message: str, script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines("train", script, "store", "--set", "lr=0.1", "--steps", 4)
    monkeypatch.setattr("sys.argv", ["hpstage", *map(str, words), "--executor", "InlineExecutor()", "--quiet"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    assert message in capsys.readouterr().err
    assert hpstage.open("store").trials == ["runs/0"]


def test_the_runs_command_fails_if_the_folder_has_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no store in .hpstage" in str(invoke("runs").exception)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", 0.1),
        ("-1e-3", -1e-3),
        ("64", 64),
        ("True", True),
        ("None", None),
        ("adam", "adam"),
        ("'adam'", "adam"),
        ("resnet-18", "resnet-18"),
        ("'inf'", "inf"),
        ("data/train", "data/train"),
        ("cosine.__globals__", "cosine.__globals__"),
        ("[0.1, 0.2]", [0.1, 0.2]),
        ("0.1,0.2", [0.1, 0.2]),
        ("cosine(0.1, 60)", s.cosine(0.1, 60)),
        ("s.cosine(0.1, T_max=60)", s.cosine(0.1, 60)),
        ("multistep(0.1, [30, 40], gamma=0.5)", s.multistep(0.1, [30, 40], gamma=0.5)),
        ("piecewise({0: 1, 5: linear(0.1)})", s.piecewise({0: 1, 5: s.linear(0.1)})),
        ("cosine(0.1, 60).until(20).then(0.01)", s.cosine(0.1, 60).until(20).then(0.01)),
        ("linear(0.1).until(5).then(cosine(0.1, 9))", s.linear(0.1).until(5).then(s.cosine(0.1, 9))),
        ("plateau(0.1, patience=2)", s.plateau(0.1, patience=2)),
        ("[cosine(0.1, 60), 0.1]", [s.cosine(0.1, 60), 0.1]),
    ],
)
def test_set_reads_values_as_python_literals_or_schedules(text: str, value: Any) -> None:
    assert values_of([f"x={text}"]) == {"x": value}


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch done')",
        "open('done', 'w')",
        "cosine(0.1, 60).__class__",
        "cosine(0.1, 60).segments",
        "sampled(open, 3)",
        "(lambda: 0)()",
        "[x for x in (1, 2)]",
        "cosine(0.1, *[60])",
        "piecewise({**{0: 1}})",
        "2**9",
        "[adam]",
        "cosine",
        "cosine(0.1)",
        "cosine(0.1, 60",
        "()" * 5000,
        "wsd_sweep(0.1)",
        "false",
        "NaN",
        "inf",
    ],
)
def test_set_refuses_expressions_that_are_not_literals_and_never_executes_them(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--set"):
        values_of([f"lr={text}"])
    assert not Path("done").exists()


@pytest.mark.parametrize("words", [["lr"], ["=0.1"], ["lr="], ["lr=0.1", "lr=0.2"]])
def test_set_requires_a_name_and_a_value_and_each_name_only_once(words: list[str]) -> None:
    with pytest.raises(UsageError, match="--set"):
        values_of(words)
