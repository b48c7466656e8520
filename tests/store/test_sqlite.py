"""What SQLiteJournal promises beyond the contract: crashes, refusing disks, foreign files, speed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path

import pytest

from hpstage.errors import StoreError
from hpstage.store import SQLiteJournal
from hpstage.store.sqlite import SCHEMA

# Appends batches of 1 to 7 records and says after each how many are acknowledged, until it is killed.
WRITER = """
import sys
from hpstage.store import SQLiteJournal
journal = SQLiteJournal(sys.argv[1])
position = 0
while True:
    size = 1 + position % 7
    journal.append([b"%d %d" % (position, size)] * size)
    position += size
    print(position, flush=True)
"""

FORK = """
import os, sys
from hpstage.errors import StoreError
from hpstage.store import SQLiteJournal
journal = SQLiteJournal(sys.argv[1])
if os.fork() == 0:
    try:
        journal.append([b"x"])
    except StoreError as error:
        print("child:", type(error).__name__, flush=True)
    journal.close()
    os._exit(0)
os.wait()
print("parent:", journal.append([b"y"]))
"""


def test_a_killed_sqlite_writer_loses_no_acknowledged_record_and_leaves_no_torn_batch(tmp_path: Path) -> None:
    for kill_after in range(1, 200, 20):
        path = tmp_path / f"{kill_after}.db"
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(kill_after):
            acknowledged = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split("\n")
        writer.stdout.close()
        writer.wait()
        # The last line may be torn, since the pipe is not a journal.
        acknowledged = int(rest[-2]) if len(rest) > 1 else acknowledged
        with closing(SQLiteJournal(path)) as journal:
            records = journal.read()
            assert len(records) >= acknowledged
            position = 0
            while position < len(records):
                size = 1 + position % 7
                assert records[position : position + size] == [b"%d %d" % (position, size)] * size
                position += size
            assert journal.append([b"after"]) == len(records)


def _open_at(path: Path, start: float) -> int:
    while time.monotonic() < start:
        pass
    with closing(SQLiteJournal(path)) as journal:
        position = journal.append([b"x"])
        assert position is not None
        return position


def test_processes_that_create_a_journal_at_the_same_time_share_one_log(tmp_path: Path) -> None:
    with multiprocessing.get_context("forkserver").Pool(4) as pool:
        pool.map(abs, range(4), 1)
        for attempt in range(5):
            jobs = [(tmp_path / f"{attempt}.db", time.monotonic() + 0.05)] * 4
            assert sorted(pool.starmap(_open_at, jobs, 1)) == [0, 1, 2, 3]
        pool.close()
        pool.join()


def test_an_append_on_a_full_disk_changes_nothing_and_later_appends_succeed(
    tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    path = tmp_path / "journal.db"
    with closing(SQLiteJournal(path)) as journal:
        journal.append([b"kept"])
        with full_disk(100_000), pytest.raises(StoreError, match=r"journal\.db.*free space"):
            journal.append([b"x" * 50_000] * 10)
        assert journal.read() == [b"kept"]
        assert journal.append([b"x" * 50_000] * 10) == 1
        assert len(journal) == 11


def test_an_append_that_fails_half_way_changes_nothing(tmp_path: Path) -> None:
    with closing(SQLiteJournal(tmp_path / "journal.db")) as journal:
        with pytest.raises(TypeError):
            journal.append([b"a", object()])  # type: ignore[list-item]
        assert len(journal) == 0
        assert journal.append([b"a"]) == 0


def test_opening_a_journal_in_a_read_only_folder_raises_an_error_with_a_remedy(
    open_folder: Path, unprivileged: Callable[[], AbstractContextManager[None]]
) -> None:
    open_folder.chmod(0o555)
    with unprivileged(), pytest.raises(StoreError, match=r"journal\.db.*may write there"):
        SQLiteJournal(open_folder / "journal.db")
    open_folder.chmod(0o755)


def test_writing_to_a_read_only_journal_file_raises_an_error_with_a_remedy(
    open_folder: Path, unprivileged: Callable[[], AbstractContextManager[None]]
) -> None:
    path = open_folder / "journal.db"
    SQLiteJournal(path).close()
    path.chmod(0o444)
    open_folder.chmod(0o555)
    with (
        unprivileged(),
        pytest.raises(StoreError, match=r"journal\.db.*(write permission|may write)"),
        closing(SQLiteJournal(path)) as journal,
    ):
        journal.append([b"x"])
    open_folder.chmod(0o755)


def test_a_file_that_is_not_a_database_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("these are notes, not a journal\n" * 100)
    content = path.read_bytes()
    with pytest.raises(StoreError, match=r"notes\.txt.*choose another path"):
        SQLiteJournal(path)
    assert path.read_bytes() == content


def test_a_database_of_another_program_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE studies (id INTEGER)")
    content = path.read_bytes()
    with pytest.raises(StoreError, match=r"study\.db.*something else"):
        SQLiteJournal(path)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["study.db"]


def test_a_folder_in_place_of_the_journal_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=str(tmp_path)):
        SQLiteJournal(tmp_path)


def test_a_file_in_place_of_the_journals_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="folder of journal"):
        SQLiteJournal(tmp_path / "file" / "journal.db")


def test_a_journal_of_a_newer_hpstage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    SQLiteJournal(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    with pytest.raises(StoreError, match=r"newer hpstage.*upgrade"):
        SQLiteJournal(path)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        *(
            f"{how} {table}"
            for how in ("DELETE FROM", "DROP TABLE")
            for table in ("log", "leases", "tokens", "generation")
        ),
        "UPDATE log SET hash = 'text'",
        "UPDATE tokens SET last = 'text'",
    ],
)
def test_tables_changed_by_another_program_are_not_reported_as_a_bug_of_hpstage(
    tmp_path: Path, change: str, before: bool
) -> None:
    path = tmp_path / "journal.db"
    with closing(SQLiteJournal(path)) as journal:
        journal.append([b"x"])
        if before:
            journal.close()
        with closing(sqlite3.connect(path)) as other:
            other.execute(change)
            other.commit()
        if before:
            with suppress(StoreError):
                journal = SQLiteJournal(path)
        uses: list[Callable[[], object]] = [
            lambda: journal.append([b"y"]),
            lambda: journal.acquire_all(["a"], "me", 5.0),
            lambda: SQLiteJournal(path, read_only=True).read(),
            lambda: SQLiteJournal(path).close(),
        ]
        complaints = []
        for use in uses:
            try:
                use()
            except StoreError as error:
                complaints.append(str(error))
        journal.close()
    assert "report it" not in " ".join(complaints)


def test_an_append_that_times_out_reports_that_another_process_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with (
        closing(SQLiteJournal(path, patience=0.05)) as journal,
        closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="another process has kept it locked"):
            journal.append([b"x"])
        other.execute("ROLLBACK")
        assert journal.append([b"x"]) == 0


def test_a_journal_opened_before_a_fork_is_refused_in_the_child_process(tmp_path: Path) -> None:
    # In a process of its own: pytest may run threads, which do not go well with a fork.
    done = subprocess.run([sys.executable, "-c", FORK, str(tmp_path / "journal.db")], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["child: StoreError", "parent: 0"], done.stderr


def test_appending_records_in_a_batch_is_faster_than_one_by_one(tmp_path: Path) -> None:
    record = b'{"type":"StateReached","node":1,"step":100}'

    def seconds(batches: list[list[bytes]]) -> float:
        began = time.perf_counter()
        for batch in batches:
            journal.append(batch)
        return time.perf_counter() - began

    with closing(SQLiteJournal(tmp_path / "journal.db")) as journal:
        # In turns, since the machine may be busy: of a thousand records, ten to seventeen times as much (measured).
        times = [(seconds([[record] * 1000] * 2), seconds([[record]] * 200)) for _ in range(10)]
    assert 2 * min(batched for batched, _ in times) / 2000 < min(single for _, single in times) / 200
