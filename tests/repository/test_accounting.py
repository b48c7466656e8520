"""Figures are computed in one package: planning does not import it, and reports, pages and commands compute none."""

from __future__ import annotations

import ast

import pytest

from tests.repository.test_rooms import FILES, arrows

COUNTS = {
    "report.tree.labels": "the width of a text",
    "report.tree.book_rows": "bytes of what is sent",
    "report.pictures.metrics": "curves on a picture",
    "report.pictures.parameters": "the height of a figure",
    "cluster.dashboard.work": "how far a running chain has come",
    "cluster.dashboard.figures": "workers of Dask's",
    "cli.copy": "logs that were copied",
    "cli.export": "rows that were written",
    "cli.gc": "bytes that lie on a storage",
    "cli.run": "trials of Optuna's study",
    "cli.status": "whether there are more trials than requested",
    "cli.tree": "branches on the screen",
}
"""Files that add something up, and what: no figure of a search."""
SUMS = {"sum", "fsum", "mean", "accumulate", "summed", "merge_rate"}


@pytest.mark.ci
@pytest.mark.parametrize("room", ["plan", "scheduler", "schedule", "store", "checkpoints"])
def test_planning_and_storage_import_no_accounting(room: str) -> None:
    assert not [
        (name, found)
        for name in FILES
        if name.partition(".")[0] == room
        for found in arrows()[name]
        if found.partition(".")[0] == "accounting"
    ]


def test_reports_pages_and_commands_compute_no_figures() -> None:
    shows = [name for name in FILES if name.startswith(("report.", "cluster.dashboard.", "cli."))]
    adds = {
        name
        for name in shows
        for node in ast.walk(ast.parse(FILES[name].read_text()))
        if isinstance(node, ast.Call) and _called(node) in SUMS
    }
    assert adds == COUNTS.keys()


@pytest.mark.ci
def test_only_the_accounting_package_uses_its_internal_tables() -> None:
    tables = {"accounting.payments", "accounting.tally", "accounting.presence"}
    uses = {name for name in FILES if name.partition(".")[0] != "accounting" and arrows()[name] & tables}
    assert uses == {"cluster.dashboard.study"}, "the page shows a study's tally"


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
