"""The rooms: which files import which. Arrows run downwards, and no two files lead to each other."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = (
    *("errors", "schedule", "store", "plan", "checkpoints", "scheduler", "accounting"),
    *("trainable", "executor", "algorithm", "algos", "boosting"),
    *("training.code", "training.identity", "training.capture", "training", "torch", "execution"),
    *("driver", "optuna", "report", "cluster", "checking", "search.results", "search", "rehearsal"),
    *("testing", "hpstage", "workloads", "cli", "__main__"),
)
"""From the bottom to the top: a file imports from its own room and from those before it."""

UPWARDS = {
    # Where torch is loaded for those alone whose code names it.
    ("training.identity.environment", "torch.environment"): "heavy: torch",
    ("training.adapter", "torch.environment"): "heavy: torch",
    ("training.run", "torch.follow"): "heavy: torch",
    ("training.function", "torch.loading.in_functions"): "heavy: torch",
    # For optuna-dashboard.
    ("optuna.saved_plots", "report.tree.for_plotly"): "a picture of the report's",
    ("optuna.saved_plots", "search.results.result"): "a type",
}
"""Imports from above, with the reason. They are all within functions, or types alone, but for those of whole files that
stand between two rooms."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "hpstage":
        parts = parts[1:]
    return ".".join(part for part in parts if part != "__init__") or "hpstage"


FILES = {
    name_of(path): path
    for folder in ("hpstage", "cluster", "algos")
    for path in (ROOT / folder).rglob("*.py")
    if not any(part.is_symlink() for part in path.parents)
}


def imports_of(name: str) -> Iterator[str]:
    """Files that one imports, anywhere in it: at its beginning, in functions, for types alone."""
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # `from hpstage.store import sqlite` is that file, not its package.
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [path if path.removeprefix("hpstage.") in FILES else node.module for path in inner]
        else:
            continue
        ours = {path.removeprefix("hpstage.") for path in found if path == "hpstage" or path.startswith("hpstage.")}
        yield from ours & FILES.keys()


@functools.cache
def arrows() -> dict[str, set[str]]:
    return {name: {found for found in imports_of(name) if found != name} for name in FILES}


def room(name: str) -> int:
    """A folder within a room may be one of its own."""
    within = ".".join(name.split(".")[:2])
    return ROOMS.index(within if within in ROOMS else name.partition(".")[0])


def test_every_source_file_belongs_to_one_of_the_listed_packages() -> None:
    assert {ROOMS[room(name)] for name in FILES} == set(ROOMS)
    assert len({name.partition(".")[0] for name in FILES} - {"hpstage"}) <= 26


@pytest.mark.ci
def test_packages_import_only_from_packages_below_them() -> None:
    upwards = {(name, found) for name in FILES for found in arrows()[name] if room(found) > room(name)}
    assert upwards == set(UPWARDS)


def test_imports_between_files_form_no_cycle() -> None:
    """Imports within functions and for types alone count, too: what they hide is a circle all the same."""
    done: set[str] = set()
    way: list[str] = []

    def follow(name: str) -> None:
        if name in way:
            pytest.fail(f"a circle: {' -> '.join([*way[way.index(name) :], name])}")
        if name in done:
            return
        way.append(name)
        for found in sorted(arrows()[name]):
            follow(found)
        way.pop()
        done.add(name)

    for name in sorted(FILES):
        follow(name)


@pytest.mark.parametrize("folder", ["hpstage/plan", "hpstage/scheduler", "hpstage/schedule"])
def test_planning_packages_import_no_module_for_files_clocks_or_processes(folder: str) -> None:
    for path in sorted((ROOT / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [node.module]
            amiss = {name.partition(".")[0] for name in names} & {"os", "time", "socket", "threading", "subprocess"}
            assert not amiss, f"{path.name} imports {', '.join(amiss)}"
