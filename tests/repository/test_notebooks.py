"""What is committed of notebooks and pictures. That notebooks run is seen by running them (nbmake)."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hpstage
from hpstage.plan.facts import DriverJoined
from hpstage.plan.log import read_facts
from hpstage.store import SQLiteJournal
from tests.unit.reports import search

ROOT = Path(hpstage.__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def texts(outputs: list[dict[str, Any]]) -> Iterator[str]:
    for output in outputs:
        yield "".join(output.get("text", ""))
        yield "".join(output.get("data", {}).get("text/plain", ""))


def test_the_three_notebooks_exist() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"quickstart", "saved_gpu_hours", "warmup_stable_decay"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_outputs_are_committed_in_order_without_errors_or_local_paths(path: Path) -> None:
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [text for text in texts(outputs) if re.search(r"(?<![\w.])/(home|root|tmp|Users)/", text)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_defines_only_a_model_and_a_space(path: Path) -> None:
    """A model and its space; what else could be a function belongs into the package."""
    source = "\n".join("".join(cell["source"]) for cell in code_cells(path))
    assert re.findall(r"^def (\w+)", source, re.MULTILINE) in ([], ["space"])
    assert len(re.findall(r"^class ", source, re.MULTILINE)) <= 1


@pytest.mark.ci
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_savings_printed_in_a_notebook_have_the_current_rows_and_are_of_a_first_run(path: Path) -> None:
    rows = [name for name, _ in search(n_trials=4).savings.rows()]
    for cell in code_cells(path):
        if not "".join(cell["source"]).endswith("print(result.savings)"):
            continue
        table = "".join(texts(cell["outputs"]))
        found = dict(line.split("  ", 1) for line in table.splitlines())
        assert [*found] == rows
        assert found["steps trained"].strip() == found["unique steps"].strip(), "saved from a second run"


@pytest.mark.ci
@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if "preflight(" in p.read_text()], ids=lambda path: path.stem)
def test_a_preflight_in_a_notebook_prints_the_committed_output(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": path.stem}
    for cell in code_cells(path):
        source = "".join(line for line in cell["source"] if not line.startswith("%"))
        exec(compile(source, path.name, "exec"), names)
        if "preflight(" in source:
            assert capsys.readouterr().out == "".join(texts(cell["outputs"]))
            return


@pytest.mark.parametrize("name", ["demo", "digits", "text"])
def test_a_recorded_plan_is_small_and_names_no_real_host(name: str) -> None:
    file = ROOT / "notebooks" / "recorded" / name / "plan.sqlite"
    assert file.stat().st_size < 1_500_000
    journal = SQLiteJournal(file, read_only=True)
    hosts = {fact.host for fact in read_facts(journal) if isinstance(fact, DriverJoined)}
    journal.close()
    assert hosts == {"workstation"}
    assert [path.name for path in file.parent.iterdir()] == ["plan.sqlite"], "readers leave no other file"


def test_every_picture_of_the_readme_is_made_by_the_pictures_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import pictures

    monkeypatch.delitem(sys.modules, "pictures")
    monkeypatch.delitem(sys.modules, "demo_digits", raising=False)
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown
    for link in shown:
        place = ROOT / link
        assert place.parent == pictures.PICTURES and place.stem in pictures.MADE and place.exists()
