"""Every store keeps the contract of the Journal."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpstage.store import Journal, MemoryJournal, RedisJournal, SQLiteJournal
from hpstage.testing import JournalContract
from tests.redis_server import RedisServer


class ShiftedClock:
    """The host's clock, ahead by the seconds that stand in a file: the same for all processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.write_text("0")

    def __call__(self) -> float:
        return time.monotonic() + float(self.path.read_text())

    def advance(self, seconds: float) -> None:
        self.path.write_text(str(float(self.path.read_text()) + seconds))


@pytest.fixture
def clock(tmp_path: Path) -> ShiftedClock:
    return ShiftedClock(tmp_path / "clock")


class TestMemoryJournal(JournalContract):
    between_processes = False

    @pytest.fixture
    def open_store(self, clock: ShiftedClock) -> Callable[[], Journal]:
        journal = MemoryJournal(clock=clock)
        return lambda: journal

    @pytest.fixture
    def advance(self, clock: ShiftedClock) -> Callable[[float], None]:
        return clock.advance


class TestSQLiteJournal(JournalContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path, clock: ShiftedClock) -> Callable[[], Journal]:
        return functools.partial(SQLiteJournal, tmp_path / "deep" / "journal.db", clock=clock)

    @pytest.fixture
    def advance(self, clock: ShiftedClock) -> Callable[[float], None]:
        return clock.advance


_prefixes = (f"contract {number}" for number in itertools.count())


@pytest.mark.redis
class TestRedisJournal(JournalContract):
    @pytest.fixture
    def prefix(self) -> str:
        return next(_prefixes)

    @pytest.fixture
    def open_store(self, shared_redis: RedisServer, prefix: str) -> Callable[[], Journal]:
        return functools.partial(RedisJournal, shared_redis.url, prefix=prefix)

    @pytest.fixture
    def advance(self, shared_redis: RedisServer, prefix: str) -> Callable[[float], None]:
        return functools.partial(set_ahead, shared_redis, prefix)


def set_ahead(server: RedisServer, prefix: str, seconds: float) -> None:
    """Set the clock of a store on Redis ahead: it runs by an offset to the server's."""
    with server.client() as client:
        client.hincrby(f"{{{prefix}}}:about", "offset", round(seconds * 1_000_000))
