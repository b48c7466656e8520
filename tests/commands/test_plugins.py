"""Plugins of another distribution, found by the command line and by URLs, and what is said of broken ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import get_args

import pytest

from hpstage import algos
from hpstage.algorithm import Algorithm
from hpstage.store import plugins

pytestmark = pytest.mark.sampled(8)

ROOT = Path(__file__).parents[2]

SEARCH = """
from hpstage import schedule as s
from hpstage.testing.toys import Tape
from small_plugin import Box, Shelf


class Crate(Box):
    pass


def space(trial):
    return {"lr": s.multistep(trial.suggest_float("lr", 0.1, 1.0), [3])}
"""
PLUGIN = """
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from hpstage.algos import FullTraining
from hpstage.checkpoints import FolderCheckpoints
from hpstage.execution.inline import InlineExecutor
from hpstage.store import SQLiteJournal
from hpstage.testing.toys import Tape
from hpstage.training.trainables import Keyed


class Box:
    '''Of another library: it has none of the methods of a trainable.'''

    def __init__(self):
        self.tape = Tape()


class Shelf:
    pass


def adapt(box):
    return Keyed(box.tape)


@dataclass(frozen=True)
class Patient(FullTraining):
    '''An algorithm of one file.'''

    seconds: int = 0


class Quiet(InlineExecutor):
    def start(self, worker, chain):
        Path("trained-by-quiet").touch()
        super().start(worker, chain)


def open_store(url, name, *, read_only=False):
    return SQLiteJournal(url.removeprefix("drawer://") + ".sqlite", read_only=read_only)


def open_checkpoints(url, workload, *, storage_options, sweep):
    return FolderCheckpoints(url.removeprefix("drawer://") + "-states", workload, sweep=sweep)


def open_nothing(*args, **kwargs):
    return None


class NoAlgorithm:
    pass


text = "nothing to call"
"""
ENTRY_POINTS = """
[hpstage.algorithms]
Patient = small_plugin:Patient
Absent = there_is_no_such_module:Absent
Nothing = small_plugin:NoAlgorithm
[hpstage.executors]
Quiet = small_plugin:Quiet
[hpstage.stores]
drawer = small_plugin:open_store
broken = small_plugin:text
empty = small_plugin:open_nothing
[hpstage.checkpoints]
empty = small_plugin:open_nothing
drawer = small_plugin:open_checkpoints
[hpstage.trainables]
small_plugin.Box = small_plugin:adapt
small_plugin.Shelf = small_plugin:open_nothing
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


def install(folder: Path) -> Path:
    """Install the distribution small-plugin, and write a script for searches. Returns where it is installed."""
    installed = folder / "installed"
    about = installed / "small_plugin-1.2.dist-info"
    about.mkdir(parents=True)
    (installed / "small_plugin.py").write_text(PLUGIN)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: small-plugin\nVersion: 1.2\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "search.py").write_text(SEARCH)
    return installed


def python(folder: Path, installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(installed)])},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def hpstage(tmp_path: Path) -> Run:
    """Runs a command where the distribution small-plugin is installed."""
    installed = install(tmp_path)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return python(tmp_path, installed, "-m", "hpstage", *words)

    return run


SPACE = ["search.py:space", "--steps", "6", "--n-trials", "3"]
OF_A_RUN = ["--metric", "score", "--direction", "minimize", "--sampler", "random", "--quiet"]


@pytest.mark.ci
def test_a_search_runs_with_algorithm_executor_store_and_checkpoints_of_a_plugin(hpstage: Run, tmp_path: Path) -> None:
    places = ["--store", "drawer://plan", "--checkpoints", "drawer://plan"]
    done = hpstage(
        *["run", "search.py:Tape", *SPACE, *OF_A_RUN, *places, "--storage", "optuna.log"],
        *["--algorithm", "Patient(seconds=3)", "--executor", "Quiet()"],
    )
    assert done.returncode == 0, done.stderr
    assert "Best trial" in done.stdout
    assert (tmp_path / "trained-by-quiet").exists()
    assert (tmp_path / "plan.sqlite").exists()
    assert any((tmp_path / "plan-states").rglob("*"))
    status = hpstage("status", "drawer://plan")
    assert status.returncode == 0, status.stderr
    assert "18 trained" in status.stdout


@pytest.mark.ci
def test_classes_that_a_plugin_adapts_and_their_subclasses_are_trained(hpstage: Run) -> None:
    for name in ("Box", "Crate"):
        done = hpstage("run", f"search.py:{name}", *SPACE, *OF_A_RUN, "--executor", "Quiet()", "--store", name)
        assert done.returncode == 0, done.stderr
        assert "Best trial" in done.stdout


def test_a_plugin_adapter_that_returns_none_is_named(hpstage: Run) -> None:
    done = hpstage("run", "search.py:Shelf", *SPACE, *OF_A_RUN, "--executor", "Quiet()")
    assert done.returncode == 1
    assert "(hpstage.trainables, small_plugin:open_nothing) returned a NoneType, not a hpstage." in done.stderr


def test_the_plan_command_accepts_an_algorithm_of_a_plugin(hpstage: Run) -> None:
    done = hpstage("plan", *SPACE, "--algorithm", "Patient")
    assert done.returncode == 0, done.stderr


REFUSED = {
    "unknown": (
        ["--algorithm", "Unheard()"],
        "give one of ASHA, Absent, FullTraining, Hyperband, MedianStopping, Nothing, OptunaPruner, Patient,",
    ),
    "absent": (
        ["--algorithm", "Absent"],
        "the plugin 'Absent' of small-plugin 1.2 (hpstage.algorithms, there_is_no_such_module:Absent) cannot be "
        "imported (ModuleNotFoundError: No module named 'there_is_no_such_module'); fix, update or uninstall "
        "small-plugin",
    ),
    "no subclass": (
        ["--algorithm", "Nothing"],
        "the plugin 'Nothing' of small-plugin 1.2 (hpstage.algorithms, small_plugin:NoAlgorithm) is not a subclass of "
        "hpstage.algorithm.Algorithm; fix, update or uninstall small-plugin",
    ),
    "unknown executor": (
        ["--executor", "Loud()"],
        "--executor 'Loud()': give one of DaskExecutor, InlineExecutor, Quiet, with its",
    ),
    "two executors": (
        ["--executor", "Quiet()", "--n-workers", "2"],
        "--scheduler and --n-workers are for Dask",
    ),
    "unknown store": (
        ["--executor", "Quiet()", "--store", "shelf://plan"],
        "store: there is no store of the kind shelf://; give a folder on a local disk, or a URL of one of "
        "broken://, drawer://, empty://, redis://, rediss://, unix://",
    ),
    "no function": (
        ["--executor", "Quiet()", "--store", "broken://plan", "--checkpoints", "states"],
        "the plugin 'broken' of small-plugin 1.2 (hpstage.stores, small_plugin:text) is not a function",
    ),
    "no journal": (
        ["--executor", "Quiet()", "--store", "empty://plan", "--checkpoints", "states"],
        "the plugin 'empty' of small-plugin 1.2 (hpstage.stores, small_plugin:open_nothing) returned a NoneType, "
        "not a hpstage.store.journal.Journal; fix, update or uninstall small-plugin",
    ),
    "no checkpoints": (
        ["--executor", "Quiet()", "--store", "drawer://plan", "--checkpoints", "empty://states"],
        "(hpstage.checkpoints, small_plugin:open_nothing) returned a NoneType",
    ),
    "shared": (
        ["--executor", "Quiet()", "--store", "drawer://plan"],
        "give --checkpoints, a location that all of them",
    ),
}
# One process for all of them: to import Optuna and Dask takes seconds.
REFUSING = """
import contextlib, io, json, sys
from hpstage.cli.app import main

found = {}
for name, words in json.loads(sys.argv[1]).items():
    sys.argv[1:] = words
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            main()
        except SystemExit as ended:
            found[name] = ended.code, stderr.getvalue()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """What each of REFUSED ends with, and says on stderr."""
    folder = tmp_path_factory.mktemp("refused")
    wanted = {name: ["run", "search.py:Tape", *SPACE, *OF_A_RUN, *words] for name, (words, _) in REFUSED.items()}
    done = python(folder, install(folder), "-c", REFUSING, json.dumps(wanted))
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_unknown_and_broken_plugins_are_named_with_the_remedy(refusals: dict[str, tuple[int, str]], name: str) -> None:
    status, stderr = refusals[name]
    assert status == 1
    assert REFUSED[name][1] in stderr
    assert len(stderr.splitlines()) == 1


def test_two_distributions_with_the_same_plugin_name_are_refused(hpstage: Run, tmp_path: Path) -> None:
    other = tmp_path / "installed" / "other_plugin-0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 0.1\n")
    (other / "entry_points.txt").write_text("[hpstage.algorithms]\nPatient = other_plugin:Patient\n")
    done = hpstage("plan", *SPACE, "--algorithm", "Patient")
    assert done.returncode == 1
    assert "small-plugin 1.2" in done.stderr and "other-plugin 0.1" in done.stderr
    assert "have the same name; uninstall one of them" in done.stderr


def test_built_in_algorithms_are_registered_as_plugins() -> None:
    kinds = {name: getattr(algos, name) for name in algos.__all__}
    ours = {name: kind for name, kind in kinds.items() if issubclass(kind, Algorithm)}
    found = {point.name: point.load() for point in entry_points(group="hpstage.algorithms")}
    assert {name: found.get(name) for name in ours} == ours


@pytest.mark.parametrize("group", sorted({*get_args(plugins.Group)} - {"hpstage.trainables"}))  # where we have none
def test_every_built_in_plugin_can_be_loaded(group: plugins.Group) -> None:
    ours = [point for point in entry_points(group=group) if point.value.startswith("hpstage.")]
    assert ours
    assert all(callable(point.load()) for point in ours)
