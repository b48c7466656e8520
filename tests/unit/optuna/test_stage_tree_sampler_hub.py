"""The OptunaHub package of StageTreeSampler: loaded as the hub loads it, and complete."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from types import ModuleType

import optuna
import pytest

from hpstage.optuna import StageTreeSampler

optunahub = pytest.importorskip("optunahub")

REGISTRY = Path(__file__).parents[3] / "scripts" / "optunahub" / "package"
PACKAGE = REGISTRY / "samplers" / "stage_tree"


def loaded(package: str) -> ModuleType:
    module = optunahub.load_local_module(package, registry_root=str(REGISTRY))
    assert isinstance(module, ModuleType)
    return module


def test_optunahub_loads_the_stage_tree_sampler_of_the_installed_package() -> None:
    module = loaded("samplers/stage_tree")
    assert module.__all__ == ["StageTreeSampler"]
    assert module.StageTreeSampler is StageTreeSampler


def test_the_example_of_the_optunahub_package_runs_as_a_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(optunahub, "load_module", loaded)  # the package is not on the hub's server
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        runpy.run_path(str(PACKAGE / "example.py"), run_name="__main__")
    finally:
        optuna.logging.set_verbosity(optuna.logging.INFO)
    count, _, rest = capsys.readouterr().out.partition(" ")
    assert int(count) < 40 and rest.startswith("learning rates")


def test_the_optunahub_package_has_the_required_files_and_front_matter() -> None:
    assert {path.name for path in PACKAGE.iterdir() if path.is_file()} >= {
        "__init__.py",
        "README.md",
        "LICENSE",
        "example.py",
        "requirements.txt",
    }
    _, front, body = (PACKAGE / "README.md").read_text().split("---\n", 2)
    fields = dict(line.split(": ", 1) for line in front.splitlines())
    assert fields.keys() == {"author", "title", "description", "tags", "optuna_versions", "license"}
    assert "sampler" in fields["tags"].strip("[]").split(", ")
    assert "5.0.0" in fields["optuna_versions"].strip("[]").split(", ")
    assert [line for line in body.splitlines() if line.startswith("## ")] == [
        "## Abstract",
        "## Class or Function Names",
        "## Installation",
        "## Example",
        "## Others",
    ]
    for block in body.split("```python\n")[1:]:
        ast.parse(block.split("```")[0])
