"""The page "Differences from Optuna": each report has a test that exists."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "notebooks" / "differences.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(("| Report ", "| --- "))
]


@cache
def names_in(path: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)}


def test_the_page_of_differences_lists_sixty_reports_each_once() -> None:
    reports = [row[0] for row in ROWS]
    assert len(reports) >= 60 and len(set(reports)) == len(reports)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_of_the_page_of_differences_names_a_report_and_an_existing_test(row: list[str]) -> None:
    report, situation, expected, result, test = row
    assert situation and expected and result
    place, number = report.split("#")
    assert number.isdigit() and ("/" in place or f"`{place}`" in PAGE or place == "optuna")
    path, name = test.strip("`").split("::")
    assert path.startswith("tests/") and name.startswith("test_") and name in names_in(path)
