"""Private names of Optuna and Dask are used in one file each: what a new version may break is found there."""

from __future__ import annotations

import ast
import importlib
import inspect
import tomllib
from collections.abc import Iterator

import pytest

from tests.repository.test_rooms import FILES, ROOT

LIBRARIES = ("optuna", "distributed", "dask")
PRIVATE = {"optuna.private", "cluster.private"}
"""The files that may."""


def libraries_of(tree: ast.AST) -> Iterator[str]:
    """Modules of Optuna's and Dask's that a file imports, and what it imports from them, as paths."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (path for path in found if path.partition(".")[0] in LIBRARIES)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def uses(source: str) -> list[str]:
    """Private names of others that a file seems to use: of objects that it did not make, imported, or inherited."""
    if not any(library in source for library in LIBRARIES):
        return []  # most files, and parsing takes all of the time
    tree = ast.parse(source)
    imported = list(libraries_of(tree))
    if not imported:
        return []
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own |= {n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    found = [path for path in imported if any(map(is_private, path.split(".")))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of = ast.unparse(node.value)
            if not (of in ("self", "cls") and node.attr in own) and of not in classes | {"os"}:
                found.append(f"{of}.{node.attr}")
    return found


@pytest.mark.parametrize("name", sorted(FILES.keys() - PRIVATE))
def test_a_file_uses_no_private_name_of_optuna_or_dask(name: str) -> None:
    assert uses(FILES[name].read_text()) == []


@pytest.mark.ci
def test_no_class_overrides_a_private_method_of_optuna_or_dask() -> None:
    for name, path in FILES.items():
        if name in PRIVATE or not any(libraries_of(ast.parse(path.read_text()))):
            continue
        module = importlib.import_module(f"hpstage.{name}")
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                theirs = {n for base in cls.__mro__ if base.__module__.startswith(LIBRARIES) for n in vars(base)}
                assert not {n for n in vars(cls).keys() & theirs if is_private(n)} - {"_abc_impl"}, cls


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("study._storage.get_trial(1)", ["study._storage"]),
        ("self.study._stop_flag", ["self.study._stop_flag"]),
        ("self._correct_state()", ["self._correct_state"]),
        ("from optuna.study._frozen import FrozenStudy", ["optuna.study._frozen.FrozenStudy"]),
        ("from distributed.core import _private", ["distributed.core._private"]),
        ("study.trials", []),
    ],
)
def test_uses_of_private_names_are_detected(line: str, found: list[str]) -> None:
    assert uses(f"import optuna\n{line}\n") == found


@pytest.mark.parametrize(("name", "library"), [("optuna.private", "optuna"), ("cluster.private", "distributed")])
def test_a_file_of_private_names_mentions_the_oldest_allowed_version_of_its_library(name: str, library: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [bound] = [line.partition(">=")[2] for line in project["dependencies"] if line.startswith(f"{library}>=")]
    assert f" {bound}." in (ast.get_docstring(ast.parse(FILES[name].read_text())) or "")
