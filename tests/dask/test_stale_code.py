"""Workers and drivers that have loaded other code than the files hold by now: never a result under the wrong key."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
from distributed import Client, LocalCluster

import hpstage
from hpstage.cluster import fork_server, local_cluster
from hpstage.errors import UsageError

optuna.logging.set_verbosity(optuna.logging.ERROR)

TRAINED = """
import helper

class Adding:
    def setup(self, hp): self.total = 0.0
    def train(self, step, hp): self.total += {used}
    def evaluate(self): return {{"total": self.total}}
    def state_dict(self): return {{"total": self.total}}
    def load_state_dict(self, state): self.total = state["total"]
"""
HELPER = """
GAIN = {gain}
def scaled(x):
    return GAIN * x
"""
MODULES = ("helper", "trained")

Write = Callable[[str, int], None]


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where modules are found, here and on workers that are started later."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("code")
        patch.syspath_prepend(str(folder))
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setattr(fork_server, "_imported", list)  # torch takes its time
        yield folder


@pytest.fixture(scope="module")
def worker(code: Path) -> Iterator[LocalCluster]:
    """A cluster of one."""
    with local_cluster(1, gpus=0) as cluster:
        yield cluster


@pytest.fixture
def write(code: Path) -> Iterator[Write]:
    """Writes a trainable that uses its helper in such a way, and a helper with such a gain."""

    def write(used: str, gain: int) -> None:
        (code / "trained.py").write_text(TRAINED.format(used=used))
        (code / "helper.py").write_text(HELPER.format(gain=gain))

    yield write
    forget()


def forget() -> None:
    importlib.invalidate_caches()
    for name in MODULES:
        sys.modules.pop(name, None)


def found(cluster: LocalCluster, folder: Path) -> float:
    with Client(cluster, set_as_default=False) as client:
        return hpstage.optimize(
            optuna.create_study(),
            importlib.import_module("trained").Adding(),
            lambda trial: {"x": 1},
            metric="total",
            steps=3,
            n_trials=1,
            executor=client,
            store=folder / f"store-{len(list(folder.iterdir()))}",
        ).best_value


def found_or_refused(cluster: LocalCluster, folder: Path) -> float | str:
    try:
        return found(cluster, folder)
    except UsageError as refused:
        named = "helper" in str(refused) and "restart" in str(refused).lower()
        return "refused, naming the helper and the remedy" if named else str(refused)


@pytest.mark.parametrize(
    "used",
    [
        "helper.scaled(hp['x'])",
        "getattr(helper, 'scaled')(hp['x'])",
        pytest.param("helper.GAIN", marks=pytest.mark.slow),
    ],
)
@pytest.mark.ci
def test_a_cluster_never_trains_old_code_of_an_edited_helper_module_under_the_new_key(
    used: str, write: Write, worker: LocalCluster, tmp_path: Path
) -> None:
    write(used, 1)
    assert found(worker, tmp_path) == 3.0
    write(used, 100)
    forget()  # as in a new process
    assert found_or_refused(worker, tmp_path) in (300.0, "refused, naming the helper and the remedy")


@pytest.mark.ci
def test_a_helper_module_edited_after_a_notebook_imported_it_is_refused_by_name(
    write: Write, worker: LocalCluster, tmp_path: Path
) -> None:
    write("helper.scaled(hp['x'])", 1)
    importlib.import_module("trained")
    write("helper.scaled(hp['x'])", 100)
    with pytest.raises(UsageError, match=r"helper\.GAIN.*a notebook's kernel"):
        found(worker, tmp_path)
    forget()
    assert found(worker, tmp_path) == 300.0


@pytest.mark.ci
def test_a_trainable_with_a_stated_version_trains_although_its_code_was_edited(
    write: Write, worker: LocalCluster, tmp_path: Path
) -> None:
    write("helper.scaled(hp['x'])", 1)
    importlib.import_module("trained").Adding.version = "1"
    write("helper.scaled(hp['x'])\n    version = '1'", 100)
    assert found(worker, tmp_path) == 300.0
