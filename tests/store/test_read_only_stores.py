"""A store is read by whoever may read its files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path

import optuna
import pytest

import hpstage
from hpstage.errors import StoreError
from hpstage.store import SQLiteJournal
from hpstage.store.opening import last_written
from hpstage.testing.toys import Tape

KILLED = """
import os, sys
from hpstage.store import SQLiteJournal
from hpstage.store.opening import last_written
journal = SQLiteJournal(sys.argv[1])
journal.append([b"two"])
os.kill(os.getpid(), 9)
"""

Unprivileged = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def finished(open_folder: Path) -> Path:
    store = open_folder / "store"
    hpstage.optimize(
        optuna.create_study(study_name="a"),
        Tape(),
        lambda trial: {"lr": trial.suggest_float("lr", 0.0, 1.0)},
        metric="score",
        steps=3,
        n_trials=2,
        executor=hpstage.InlineExecutor(),
        store=store,
    )
    lock(store)
    return store


def lock(store: Path) -> None:
    """Leave nobody the right to write, and everybody that to read."""
    for path in (store, *store.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)


def look(*words: str) -> str:
    """Run a command as somebody who may not write to what belongs to others; return what it prints."""
    others = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    ran = subprocess.run(
        [*others, sys.executable, "-m", "hpstage", *words], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.ci
@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root needs setpriv for it")
def test_commands_show_a_finished_store_without_write_permission(finished: Path, tmp_path: Path) -> None:
    store = str(finished)
    assert "2 complete" in look("status", store)
    assert look("tree", store)
    assert "needed" in look("gc", store, "--dry-run", "--budget", "0")
    look("report", store, str(tmp_path / "report"))
    look("export", store, "tables", str(tmp_path / "tables"), "--format", "csv")
    assert {path.name for path in finished.iterdir()} == {"checkpoints", "plan.sqlite"}


def test_open_loads_states_of_a_finished_store_without_write_permission(
    finished: Path, unprivileged: Unprivileged
) -> None:
    with unprivileged():
        best = hpstage.open(finished).best_trial()
        assert best.state()["score"] > 0


def test_a_read_only_journal_sees_records_appended_after_it_was_opened(
    open_folder: Path, unprivileged: Unprivileged
) -> None:
    path = open_folder / "store" / "plan.sqlite"
    with closing(SQLiteJournal(path)) as journal:
        journal.append([b"one"])
    lock(path.parent)
    with unprivileged():
        reader = SQLiteJournal(path, read_only=True)
        assert reader.read() == [b"one"]
    for _ in range(2):
        with closing(SQLiteJournal(path)) as journal:
            journal.append([b"more"])
            with unprivileged():
                during = reader.read()
            assert during == journal.read()
        with unprivileged():
            assert reader.read() == during
    reader.close()


def test_a_reader_without_write_permission_sees_the_last_records_of_a_killed_writer(
    open_folder: Path, unprivileged: Unprivileged
) -> None:
    path = open_folder / "store" / "plan.sqlite"
    with closing(SQLiteJournal(path)) as journal:
        journal.append([b"one"])
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    lock(path.parent)
    copied = open_folder / "copied"
    shutil.copytree(path.parent, copied)
    (copied / "plan.sqlite-shm").unlink()
    lock(copied)
    with unprivileged(), pytest.raises(StoreError, match="let its owner run `hpstage status`"):
        SQLiteJournal(copied / "plan.sqlite", read_only=True)
    SQLiteJournal(copied / "plan.sqlite", read_only=True).close()
    with unprivileged(), closing(SQLiteJournal(copied / "plan.sqlite", read_only=True)) as journal:
        assert journal.read() == [b"one", b"two"]
    with unprivileged(), closing(SQLiteJournal(path, read_only=True)) as journal:
        assert journal.read() == [b"one", b"two"]


def test_reading_a_store_does_not_count_as_writing_it(tmp_path: Path) -> None:
    with closing(SQLiteJournal(tmp_path / "plan.sqlite")) as journal:
        journal.append([b"{}"])
        for file in tmp_path.iterdir():
            os.utime(file, (1e9, 1e9))
        os.utime(tmp_path / "plan.sqlite-shm")  # as SQLite's readers do, on disks
        assert last_written(tmp_path) == 1e9
        journal.append([b"{}"])
        assert last_written(tmp_path) > 1e9
