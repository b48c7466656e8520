"""Writes the figures of record into README.md and the book.

    python scripts/figures.py       write those of notebooks/recorded/figures.json into the pages
    python scripts/figures.py demo "makespan with / without sharing" "12 s / 40 s" --command "./scripts/demo --compare"

Scripts that measure write their figures into that file themselves (``--record``), in the rows that name the same
command. Such a row has the texts of its further cells in "from", where ``{decide shared 10000.one_us:.0f}`` stands for
a figure of the script's JSON: a path of names, indices, labels of rows (their texts and size), and median, least or
most of a list. The second command is for other rows. A page has a whole table, or one cell of it, between marks::

    <!--peers-->                                       until <!--/-->
    <!--peers:hpstage:wall-->72.1 s<!--/-->            of the row "hpstage", the column "wall" (or else the second)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "notebooks" / "recorded" / "figures.json"
PAGES = [ROOT / "README.md", *sorted((ROOT / "notebooks").glob("*.md"))]
MARKED = re.compile(r"<!--(\w+)(?::([^:>]+))?(?::([^:>]+))?-->(.*?)<!--/-->", re.DOTALL)

Figures = dict[str, dict[str, Any]]


def record_from(command: str, found: object) -> None:
    """Record what a command has measured, in the rows that name it."""
    figures = read()
    for name, its in figures.items():
        rows = []
        for row in its["rows"]:
            if "from" in row and row["command"] == command:  # with other options it measures something else
                rows.append([row["cells"][0], *(filled_in(text, found) for text in row["from"])])
        if rows:
            record(name, rows, command)
            print(f"{name}: {', '.join(cells[0] for cells in rows)}")


def filled_in(text: str, found: object) -> str:
    """Return a text with figures of ``found`` in place of ``{path:format}``."""
    return re.sub(r"\{([^{}]+):([^{}:]*)\}", lambda one: format(at_path(found, one[1]), one[2]), text)


def at_path(found: Any, path: str) -> Any:
    for name in path.split("."):
        if isinstance(found, dict):
            found = found[name]
        elif found and isinstance(found[0], dict):
            found = {_label(row): row for row in found}[name]
        elif name.isdecimal():
            found = found[int(name)]
        else:
            found = {"median": median, "least": min, "most": max}[name](found)
    return found


def _label(row: dict[str, Any]) -> str:
    return " ".join(str(value) for name, value in row.items() if isinstance(value, str) or name == "size")


def record(table: str, rows: Iterable[list[str]], command: str) -> None:
    """Put rows into a table, each in the place of the one with the same first cell, and write the pages."""
    figures = read()
    measured = {
        "command": command,
        "commit": git("rev-parse", "--short", "HEAD"),
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
    }
    kept = {row["cells"][0]: row for row in figures[table]["rows"]}
    kept |= {cells[0]: kept.get(cells[0], {}) | {"cells": cells, **measured} for cells in rows}
    figures[table]["rows"] = list(kept.values())
    RECORD.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    write()


def read() -> Figures:
    found: Figures = json.loads(RECORD.read_text())
    return found


def write() -> None:
    figures = read()
    for page in PAGES:
        page.write_text(with_figures(page.read_text(), figures))


def with_figures(text: str, figures: Figures) -> str:
    """Return a page with the figures of record between its marks; KeyError for a mark that names none."""

    def filled(found: re.Match[str]) -> str:
        name, row, column, _ = found.groups()
        mark = found[0].partition("-->")[0]
        return f"{mark}-->{cell(figures, name, row, column) if row else table(figures[name])}<!--/-->"

    return MARKED.sub(filled, text)


def cell(figures: Figures, name: str, row: str, column: str | None) -> str:
    by_label: dict[str, list[str]] = {one["cells"][0]: one["cells"] for one in figures[name]["rows"]}
    return by_label[row][figures[name]["columns"].index(column) if column else 1]


def table(found: dict[str, Any]) -> str:
    lines = [found["columns"], ["---"] * len(found["columns"]), *(row["cells"] for row in found["rows"])]
    return "\n\n" + "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines) + "\n\n"


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", help="a table of the record")
    parser.add_argument("cells", nargs="*", help="a row of it; without any, the pages are written alone")
    parser.add_argument("--command", help="what has measured the row")
    options = parser.parse_args()
    if options.table is None:
        write()
    elif not options.cells or options.command is None:
        parser.error("give the cells of a row and --command")
    else:
        record(options.table, [options.cells], options.command)


if __name__ == "__main__":
    main()
