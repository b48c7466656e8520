"""Arguments of a script that a command imports, which the script parses as if Python ran it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import argparse, sys

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, required=True)
args = parser.parse_args()

def space(trial):
    return {"lr": trial.suggest_categorical("lr", [0.1] * args.width), "program": sys.argv[0].rpartition("/")[2]}

def in_the_space(trial):
    return {"lr": float(parser.parse_args().width)}
"""


def plan(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    folder.joinpath("script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "hpstage", "plan", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.ci
@pytest.mark.parametrize("space", ["space", "in_the_space"])
def test_a_script_parses_the_arguments_after_two_dashes(space: str, tmp_path: Path) -> None:
    done = plan(tmp_path, f"script.py:{space}", "--steps", "4", "--n-trials", "1", "--", "--width", "3")
    assert done.returncode == 0, done.stderr
    assert "steps" in done.stdout


@pytest.mark.ci
def test_a_script_that_exits_for_missing_arguments_is_named_with_the_remedy(tmp_path: Path) -> None:
    done = plan(tmp_path, "script.py:space", "--steps", "4", "--n-trials", "1")
    assert done.returncode == 1
    assert "usage: script.py" in done.stderr, "not of hpstage"
    assert "script.py exits with status 2 when it is imported. Give its own arguments at the end, after --" in (
        " ".join(done.stderr.split())
    )
