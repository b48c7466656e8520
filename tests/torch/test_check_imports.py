"""``hpstage check`` finds what is drawn where a script is imported: a later search would draw other numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hpstage.checking import Children, conduct
from hpstage.cli.app import app

SCRIPT = """
import random
import numpy as np
import torch

NOISE = np.random.rand(3)
BASE = torch.nn.Linear(2, 2)
SCALE = 2.0

def train(run):
    model = torch.nn.Linear(1, 1)
    run.attach(model=model)
    for _ in run.steps():
        with torch.no_grad():
            model.weight += float(NOISE.sum()) * SCALE + float(BASE.weight.sum())
        run.report(loss=model.weight.item())

class Own:
    def __init__(self): self.start = random.random()
    def setup(self, hp): self.value = self.start
    def train(self, step, hp): self.value += hp["rate"]
    def evaluate(self): return {"loss": self.value}
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, state): self.value = state["value"]

def space(trial):
    return {"rate": trial.suggest_categorical("rate", [0.1, 0.2])}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for scripts, where modules are found. What is checked in it is trained in processes that are forked from
    the same three: each check would have three of its own import torch."""
    folder = tmp_path_factory.mktemp("scripts")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with Children(["numpy", "torch"]) as shared:
            patch.setattr(conduct, "Children", lambda libraries: nullcontext(shared))
            yield folder


def checked(script: Path, name: str) -> dict[str, Any]:
    written = script.with_suffix(".json")
    words = [f"{script}:{name}", f"{script}:space", "--steps", "2", "--forks", "1", "--json", str(written), "--quiet"]
    done = CliRunner().invoke(app, ["check", *words])
    found: dict[str, Any] = json.loads(written.read_text())
    assert done.exit_code == (not found["ok"]), done.output
    return found


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "variables"),
    [("train", "{0}.BASE, {0}.NOISE"), ("Own", "self.start, self.value")],
    ids=["module", "class"],
)
def test_check_names_random_numbers_drawn_at_import_with_a_remedy_that_works(
    folder: Path, name: str, variables: str
) -> None:
    script = folder / f"drawn_for_{name}.py"
    script.write_text(SCRIPT)
    finding = checked(script, name)["differences"][0]
    assert finding["cause"].startswith(f"{variables.format(script.stem)}: made where")
    (line,) = re.findall(r"`(import .*?)`", finding["remedy"])
    script = folder / f"seeded_for_{name}.py"
    script.write_text(f"{line}\n{SCRIPT}")
    assert checked(script, name)["ok"]


SHARED = """
import torch
samples = torch.arange(8.0)
def evaluate(model):
    model.eval()
    return {"loss": float(model(samples[:, None]).sum())}
"""
USER = """
import torch
from shared import evaluate, samples

def train(run):
    model = torch.nn.Linear(1, 1)
    run.attach(model=model)
    for step in run.steps():
        with torch.no_grad():
            model.weight += samples[step] * run.hp["rate"]
        run.report(**evaluate(model))

def space(trial):
    return {"rate": trial.suggest_categorical("rate", [0.1, 0.2])}
"""


@pytest.mark.ci
def test_check_finds_no_difference_in_a_name_imported_from_another_module(folder: Path) -> None:
    """A script is sent by value, its modules by name: its tensor is another object than theirs, in every process."""
    (folder / "shared.py").write_text(SHARED)
    script = folder / "user_of_another.py"
    script.write_text(USER)
    found = checked(script, "train")
    assert found["ok"], found


@pytest.mark.ci
def test_a_traceback_of_check_shows_file_and_line_of_the_script(folder: Path) -> None:
    script = folder / "failing.py"
    script.write_text(SCRIPT.replace("self.value += hp", "self.value += 1 // 0; hp"))
    finding = checked(script, "Own")["differences"][0]
    line = script.read_text().splitlines().index('    def train(self, step, hp): self.value += 1 // 0; hp["rate"]') + 1
    assert (
        f'File "{script}", line {line}, in train\n    def train(self, step, hp): self.value += 1 // 0'
        in finding["cause"]
    )
