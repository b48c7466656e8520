"""The files of a SQLite journal that are moved, deleted or written over while it is open: the next write says so."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import optuna
import pytest

import hpstage
from hpstage.errors import StoreError
from hpstage.store import SQLiteJournal
from hpstage.testing.toys import Tape


def delete(plan: Path) -> None:
    for end in ("", "-wal", "-shm"):
        plan.with_name(plan.name + end).unlink()


def delete_the_log(plan: Path) -> None:
    plan.with_name(f"{plan.name}-wal").unlink()


def move(plan: Path) -> None:
    plan.rename(plan.with_name("old"))


def move_the_folder(plan: Path) -> None:
    plan.parent.rename(plan.parent.with_name("old"))


def replace(plan: Path) -> None:
    shutil.copy(plan, plan.with_name("copy"))
    plan.with_name("copy").replace(plan)


def begin_again(plan: Path) -> None:
    delete(plan)
    SQLiteJournal(plan).close()


def write_over(plan: Path) -> None:
    SQLiteJournal(plan.with_name("other")).close()
    shutil.copyfile(plan.with_name("other"), plan)


def write_garbage_over(plan: Path) -> None:
    plan.write_bytes(b"garbage" * 10_000)


HARMS = (delete, delete_the_log, move, move_the_folder, replace, begin_again, write_over, write_garbage_over)


@pytest.mark.ci
@pytest.mark.parametrize("harm", HARMS)
def test_writes_to_a_sqlite_journal_are_refused_after_its_files_were_moved_or_overwritten(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    path = tmp_path / "store" / "plan.sqlite"
    journal = SQLiteJournal(path)
    journal.append([b"one"])
    given = journal.acquire_all(["lease"], "me", 60.0)
    assert given is not None
    harm(path)
    for write in (
        lambda: journal.append([b"two"]),
        lambda: journal.renew_all(given, 60.0),
        lambda: journal.release_all(given),
    ):
        with pytest.raises(StoreError, match=r"plan\.sqlite(-wal)? was .* while it was in use.* put them back"):
            write()
    journal.close()


def test_an_older_copy_written_over_the_sqlite_file_is_detected_by_the_next_append(tmp_path: Path) -> None:
    path = tmp_path / "plan.sqlite"
    SQLiteJournal(path).close()
    shutil.copyfile(path, tmp_path / "copy")
    with_much = SQLiteJournal(path)
    for _ in range(3):
        with_much.append([bytes(4000)] * 1500)  # more than the write-ahead log takes
    shutil.copyfile(tmp_path / "copy", path)
    with pytest.raises(StoreError, match="written over"):
        with_much.append([b"more"])
    with_much.close()


def test_appends_succeed_while_a_reader_keeps_records_in_the_write_ahead_log(tmp_path: Path) -> None:
    path = tmp_path / "plan.sqlite"
    journal = SQLiteJournal(path)
    journal.append([bytes(1000)] * 40)
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM log").fetchone()
        journal.append([b"to the last page"])
        with closing(sqlite3.connect(path)) as mover:
            _, pages, moved = mover.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        assert moved < pages, "the database is whole: the test shows nothing"
        journal.append([b"more"])
    assert len(journal) == 42
    journal.close()


def test_a_sqlite_journal_can_be_used_again_after_its_moved_folder_is_put_back(tmp_path: Path) -> None:
    path = tmp_path / "store" / "plan.sqlite"
    journal = SQLiteJournal(path)
    journal.append([b"one"])
    move_the_folder(path)
    with pytest.raises(StoreError):
        journal.append([b"two"])
    journal.close()
    (tmp_path / "old").rename(path.parent)
    again = SQLiteJournal(path)
    assert again.read() == [b"one"]
    assert again.append([b"two"]) == 1
    again.close()


def test_a_sqlite_file_of_an_earlier_version_accepts_appends(tmp_path: Path) -> None:
    journal = SQLiteJournal(tmp_path / "plan.sqlite")
    journal._open().execute("DROP TABLE generation")
    journal.close()
    earlier = SQLiteJournal(tmp_path / "plan.sqlite")
    assert earlier.append([b"one"]) == 0
    earlier.close()


@pytest.mark.parametrize("ended", ["", "by Ctrl-C"])
def test_a_search_raises_an_error_if_its_plan_file_is_deleted_during_the_run(
    tmp_path: Path, ended: str, caplog: pytest.LogCaptureFixture
) -> None:
    def harm(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number == 2:
            delete(tmp_path / "plan.sqlite")
            if ended:
                os.kill(os.getpid(), 2)

    with pytest.raises(StoreError, match=r"plan\.sqlite was moved or deleted") as raised:
        hpstage.optimize(
            optuna.create_study(),
            Tape(),
            lambda trial: {"lr": trial.suggest_float("lr", 0.0, 1.0)},
            metric="score",
            steps=3,
            n_trials=20,
            executor=hpstage.InlineExecutor(),
            store=tmp_path,
            callbacks=[harm],
        )
    assert "progress is kept" not in str(raised.value) + caplog.text
