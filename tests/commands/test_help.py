"""What every command says of itself: its help and its complaints stand on the terminal as they were written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer import Context
from typer.testing import CliRunner

from hpstage.cli.app import app
from hpstage.errors.text import clean_lines

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_shows_each_example_on_its_own_line(command: str) -> None:
    helped = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).output
    assert not re.search(r"\\[a-z](?![a-z])|[\t\b]", helped)
    written = re.findall(rf"^ +(hpstage {command}.*)$", COMMANDS[command].callback.__doc__ or "", re.MULTILINE)
    shown = [line.strip() for line in helped.splitlines()]
    assert all(example in shown for example in written)
    assert written or command in ("plan", "gc", "deploy")


def complaint(*words: object, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "hpstage", *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode
    return done.stderr


def test_the_error_of_a_missing_argument_lists_its_choices_on_separate_lines() -> None:
    lines = complaint("export", "somewhere").splitlines()
    assert {"tables", "weights", "tensorboard"} <= {line.strip().rstrip(",") for line in lines}
    assert not any("\\" in line for line in lines)


@pytest.mark.parametrize(
    ("command", "option", "words"),
    [
        ("check", "numerics", {"eager", "compiled", "graphed", "stacked"}),
        ("plan", "sampler", {"random", "tpe", "grid"}),
        ("run", "direction", {"minimize", "maximize"}),
        ("train", "direction", {"minimize", "maximize"}),
    ],
)
def test_options_that_take_certain_words_complete_them(command: str, option: str, words: set[str]) -> None:
    [parameter] = [parameter for parameter in COMMANDS[command].params if parameter.name == option]
    assert words <= {found.value for found in parameter.shell_complete(Context(COMMANDS[command]), "")}


@pytest.mark.parametrize("words", [["run", "a.py:A", "a.py:space", "--metric=loss"], ["train", "a.py:A", "--steps=9"]])
def test_a_direction_other_than_minimize_and_maximize_is_refused(words: list[str]) -> None:
    refused = CliRunner().invoke(app, [*words, "--direction=up"], env={"COLUMNS": "80"})
    assert refused.exit_code == 2
    assert "'up' is not one of 'minimize', 'maximize'" in refused.stderr


def test_clean_lines_keeps_newlines_and_tabs_and_escapes_control_characters() -> None:
    assert clean_lines("a\tb\n\tc\r\x1b[31m\n") == "a\tb\n\tc\\r\\x1b[31m\n"


@pytest.mark.parametrize("folder", ["", "./", "../here/", ".//below/../", "below/"])
def test_plan_finds_a_script_by_any_path_to_it(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    (here / "below").mkdir(parents=True)
    for place in (here, here / "below"):
        (place / "searched_here.py").write_text(
            "def space(trial):\n    return {'lr': trial.suggest_categorical('lr', [0.1, 0.2])}\n"
        )
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path])
    done = CliRunner().invoke(app, ["plan", f"{folder}searched_here.py:space", "--steps", "4", "--n-trials", "2"])
    sys.modules.pop("searched_here", None)
    assert done.exit_code == 0, done.output
    assert re.search(r"^steps \w+ +8$", done.output, re.MULTILINE)


@pytest.mark.parametrize("wrong", [".searched_here:space", "./searched_here:space", "..:space", ".py:", ":space"])
def test_plan_refuses_an_argument_that_names_no_module_or_script(wrong: str) -> None:
    done = CliRunner().invoke(app, ["plan", wrong, "--steps", "4"])
    assert "give MODULE:NAME, or path/to/script.py:NAME" in str(done.exception)


def test_deploy_accepts_a_file_name_with_or_without_its_extension() -> None:
    whole, short = (CliRunner().invoke(app, ["deploy", name]).output for name in ("slurm.sh", "slurm"))
    assert whole == short and whole.startswith("#!/usr/bin/env bash")
    assert "give one of Dockerfile, " in str(CliRunner().invoke(app, ["deploy", "slur"]).exception)
