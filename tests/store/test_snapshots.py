"""What stores promise of snapshots beyond the contract: writers that die, disks that refuse, keys that expire."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest

from hpstage.errors import StoreError
from hpstage.store import RedisJournal, SQLiteJournal, redis_scripts
from hpstage.store.redis import PART
from tests.redis_server import RedisServer

# Is killed by itself in the midst of its second snapshot.
WRITER = """
import os, signal, sys
from hpstage.store import SQLiteJournal
journal = SQLiteJournal(sys.argv[1])
journal.write_snapshot(b"first")
os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
journal.write_snapshot(b"second" * 1000)
"""


def test_a_snapshot_survives_a_killed_writer_and_can_be_replaced_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    done = subprocess.run([sys.executable, "-c", WRITER, str(path)])
    assert done.returncode == -signal.SIGKILL
    with closing(SQLiteJournal(path)) as journal:
        assert journal.read_snapshot() == b"first"
        journal.write_snapshot(b"third")
        assert journal.read_snapshot() == b"third"
    assert sorted(os.listdir(tmp_path)) == ["journal.db", "journal.db-snapshot"]


def test_a_failed_write_on_a_full_disk_keeps_the_snapshot_and_leaves_no_other_file(
    tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    with closing(SQLiteJournal(tmp_path / "journal.db")) as journal:
        journal.write_snapshot(b"small")
        with full_disk(100_000), pytest.raises(StoreError, match=r"journal\.db-snapshot: File too large"):
            journal.write_snapshot(b"x" * 1_000_000)
        assert journal.read_snapshot() == b"small"
    assert sorted(os.listdir(tmp_path)) == ["journal.db", "journal.db-snapshot"]


def test_a_read_only_journal_reads_snapshots_and_refuses_to_write_them(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with closing(SQLiteJournal(path)) as journal, closing(SQLiteJournal(path, read_only=True)) as reader:
        assert reader.read_snapshot() is None
        journal.write_snapshot(b"a")
        with pytest.raises(StoreError, match="opened read-only"):
            reader.write_snapshot(b"b")
        assert reader.read_snapshot() == b"a"


@pytest.mark.redis
def test_redis_expires_the_unfinished_snapshot_of_a_dead_writer(shared_redis: RedisServer) -> None:
    with closing(RedisJournal(shared_redis.url, prefix="dying")) as journal, shared_redis.client() as client:
        journal.write_snapshot(b"x" * (PART + 1))
        assert client.keys("{dying}:snapshot*") == [b"{dying}:snapshot"] and client.ttl("{dying}:snapshot") == -1
        keys = [*journal._keys, "{dying}:snapshot:other"]
        journal._run(redis_scripts.WRITE_PART, 600, 0, b"y", keys=keys)  # it wanted to write two
        assert 0 < client.ttl(keys[-1]) <= 600
        assert journal._run(redis_scripts.REPLACE_SNAPSHOT, "other", 2, keys=keys) == [b"late"]
        assert journal.read_snapshot() == b"x" * (PART + 1)


@pytest.mark.redis
def test_a_repeated_request_to_replace_a_redis_snapshot_keeps_the_new_snapshot(shared_redis: RedisServer) -> None:
    with closing(RedisJournal(shared_redis.url, prefix="retried")) as journal:
        keys = [*journal._keys, "{retried}:snapshot:one"]
        journal._run(redis_scripts.WRITE_PART, 600, 0, b"y", keys=keys)
        journal._run(redis_scripts.WRITE_PART, 600, 0, b"y", keys=keys)
        assert journal._run(redis_scripts.REPLACE_SNAPSHOT, "one", 1, keys=keys) == [b"replaced"]
        assert journal._run(redis_scripts.REPLACE_SNAPSHOT, "one", 1, keys=keys) == [b"late"]
        assert journal.read_snapshot() == b"y"


@pytest.mark.redis
def test_a_redis_snapshot_with_a_missing_part_is_read_as_none(shared_redis: RedisServer) -> None:
    with closing(RedisJournal(shared_redis.url, prefix="lacking")) as journal, shared_redis.client() as client:
        journal.write_snapshot(b"x" * (3 * PART))
        client.hdel("{lacking}:snapshot", "1")
        assert journal.read_snapshot() is None
