"""README and the book have the figures of record, which the scripts that measured them have written."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.repository.test_rooms import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import command_line
import figures as record

FIGURES = record.read()


@pytest.mark.parametrize("page", record.PAGES, ids=lambda page: page.stem)
def test_a_page_shows_the_recorded_figures(page: Path) -> None:
    assert record.with_figures(page.read_text(), FIGURES) == page.read_text(), "run: python scripts/figures.py"


def test_every_table_of_the_page_of_measurements_comes_from_the_recorded_figures() -> None:
    measured = (ROOT / "notebooks" / "measured.md").read_text()
    assert {found[1] for found in record.MARKED.finditer(measured) if found[2] is None} == FIGURES.keys()
    assert not re.findall(r"^\|.*", record.MARKED.sub("", measured), re.MULTILINE)
    readme = record.MARKED.findall((ROOT / "README.md").read_text())
    assert {name for name, *_ in readme} == {"demo", "peers"}


@pytest.mark.parametrize("name", FIGURES)
def test_every_recorded_figure_names_its_command_machine_commit_and_date(name: str) -> None:
    rows: list[dict[str, Any]] = FIGURES[name]["rows"]
    labels = [row["cells"][0] for row in rows]
    assert len(set(labels)) == len(labels), "a row is found by its first cell"
    for row in rows:
        assert len(row["cells"]) == len(FIGURES[name]["columns"])
        assert row["machine"] and re.fullmatch("[0-9a-f]{7,}", row["commit"]) and row["date"] >= "2026-11-23"
        script = re.search(r"scripts[/.](\w+)", row["command"])
        assert row["command"].startswith("hpstage") or (script and list((ROOT / "scripts").glob(f"{script[1]}*")))


@pytest.mark.parametrize("name", [name for name in FIGURES if any("from" in row for row in FIGURES[name]["rows"])])
def test_rows_with_templates_name_a_script_that_records_them(name: str) -> None:
    for row in FIGURES[name]["rows"]:
        if "from" in row:
            script = (ROOT / row["command"].partition(" ")[0]).read_text()
            assert "parser_of(__doc__)" in script and re.search(r"\n    write\((options|arguments), ", script)
            assert len(row["from"]) == len(row["cells"]) - 1
            assert any("{" in text for text in row["from"])


def test_a_script_with_record_writes_the_rows_that_name_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "scripts/bench_mine.py --part decide"
    rows = [
        {"cells": ["one report", "?"], "from": ["{rows.decide shared 10.one_us:.1f} µs"], "command": command},
        {
            "cells": ["recovery", "?"],
            "from": ["{s.a / b.median:.2f} ({s.a / b.least:.0f} to {s.a / b.2:.0f})"],
            "command": command,
        },
        {
            "cells": ["of a short run", "old"],
            "from": ["{rows.decide shared 10.one_us:.1f}"],
            "command": f"{command} -n 1",
        },
        {"cells": ["typed", "old"], "command": command},
    ]
    monkeypatch.setattr(record, "RECORD", tmp_path / "figures.json")
    monkeypatch.setattr(record, "PAGES", [])
    record.RECORD.write_text(json.dumps({"mine": {"columns": ["what", "figure"], "rows": rows}}))
    script = str(ROOT / "scripts" / "bench_mine.py")
    monkeypatch.setattr(sys, "argv", [script, "--record", "--part", "decide", "--json", str(tmp_path / "mine.json")])
    options = command_line.parser_of("A script.").parse_args(["--record"])
    measured = {"part": "decide", "kind": "shared", "size": 10, "one_us": 2.04}
    command_line.write(options, {"rows": [measured], "s": {"a / b": [1, 2.5, 9]}})
    kept = record.read()["mine"]["rows"]
    assert [row["cells"][1] for row in kept] == ["2.0 µs", "2.50 (1 to 9)", "old", "old"]
    assert [row["command"] for row in kept] == [row["command"] for row in rows]
    assert "from" in kept[0], "for the next measurement"
    assert "mine: one report, recovery" in capsys.readouterr().out


def test_the_demo_page_shows_the_recorded_figures_of_the_demo() -> None:
    shown = (ROOT / "notebooks" / "demo.md").read_text()
    for row in ("steps requested", "steps trained"):
        assert re.search(rf"^{row} +{re.escape(record.cell(FIGURES, 'demo', row, None))}$", shown, re.MULTILINE)


def test_a_new_measurement_replaces_the_earlier_row_in_the_record_and_on_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("It takes <!--demo:makespan-->1 s<!--/-->, of:\n<!--demo--><!--/-->\n")
    monkeypatch.setattr(record, "RECORD", tmp_path / "figures.json")
    monkeypatch.setattr(record, "PAGES", [page])
    record.RECORD.write_text('{"demo": {"columns": ["what", "figure"], "rows": [{"cells": ["makespan", "1 s"]}]}}')
    record.record("demo", [["makespan", "2 s"], ["steps", "3"]], "scripts/demo")
    table = "<!--demo-->\n\n| what | figure |\n| --- | --- |\n| makespan | 2 s |\n| steps | 3 |\n\n<!--/-->"
    assert page.read_text() == f"It takes <!--demo:makespan-->2 s<!--/-->, of:\n{table}\n"
    assert [row["command"] for row in record.read()["demo"]["rows"]] == ["scripts/demo"] * 2


def test_rows_of_the_peers_benchmark_have_the_columns_of_the_recorded_table() -> None:
    import bench_peers

    def program(*walls: float) -> dict[str, Any]:
        rounds = [{"wall": wall, "worker_seconds": 2 * wall} for wall in walls]
        return {"wall": walls[1], "worker_seconds": 1, "steps": 46_800, "memory": 1e9, "best": 0.96, "rounds": rounds}

    rows = bench_peers.rows(
        {"hpstage": program(1, 2, 3), "hpstage, fused": program(1, 1, 1), "optuna": program(3, 4, 9)}
    )
    assert rows[0] == ["hpstage", "2.0 s", "", "1.0", "", "46,800", "1.0 GB", "0.9600"]
    assert rows[1][2] == "0.50" and rows[2][:3] == ["Optuna, a pool of processes", "4.0 s", "3.00, 4.00"]
    assert {row[0] for row in rows} <= {row["cells"][0] for row in FIGURES["peers"]["rows"]}
    assert {len(row) for row in rows} == {len(FIGURES["peers"]["columns"])}
