"""Every journal keeps the contract, and all agree with each other under any sequence of calls."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hpstage.store import Journal, MemoryJournal, SQLiteJournal
from hpstage.testing import JournalContract


class TestMemoryJournal(JournalContract):
    between_processes = False

    @pytest.fixture
    def open_journal(self) -> Callable[[], Journal]:
        journal = MemoryJournal()
        return lambda: journal


class TestSQLiteJournal(JournalContract):
    @pytest.fixture
    def open_journal(self, tmp_path: Path) -> Callable[[], Journal]:
        return functools.partial(SQLiteJournal, tmp_path / "deep" / "journal.db")


RECORDS = st.lists(st.binary(max_size=8), max_size=4)
REQUESTS = st.none() | st.sampled_from(["a", "b", "c", "d"])


class JournalsAgree(RuleBasedStateMachine):
    """Drives a journal in memory and one in SQLite, with two handles, by the same calls."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "journal.db"
        self.memory = MemoryJournal()
        self.handles = [SQLiteJournal(self.path), SQLiteJournal(self.path)]

    @rule(handle=st.integers(0, 1), records=RECORDS, request=REQUESTS, expect=st.none() | st.integers(0, 12))
    def append(self, handle: int, records: list[bytes], request: str | None, expect: int | None) -> None:
        position = self.memory.append(records, request=request, expect=expect)
        assert self.handles[handle].append(records, request=request, expect=expect) == position

    @rule(handle=st.integers(0, 1), records=RECORDS, request=REQUESTS)
    def append_to_what_was_read(self, handle: int, records: list[bytes], request: str | None) -> None:
        length = len(self.memory)
        position = self.memory.append(records, request=request, expect=length)
        assert position is not None
        assert self.handles[handle].append(records, request=request, expect=length) == position

    @rule(handle=st.integers(0, 1), start=st.integers(0, 20), limit=st.none() | st.integers(0, 20))
    def read(self, handle: int, start: int, limit: int | None) -> None:
        assert self.handles[handle].read(start, limit) == self.memory.read(start, limit)

    @rule(handle=st.integers(0, 1), length=st.integers(0, 20))
    def wait(self, handle: int, length: int) -> None:
        assert self.handles[handle].wait(length, 0) == self.memory.wait(length, 0)

    @rule(handle=st.integers(0, 1))
    def reopen(self, handle: int) -> None:
        self.handles[handle].close()
        self.handles[handle] = SQLiteJournal(self.path)

    @invariant()
    def lengths_agree(self) -> None:
        assert [len(handle) for handle in self.handles] == [len(self.memory)] * 2

    def teardown(self) -> None:
        for handle in self.handles:
            handle.close()
        self.folder.cleanup()


TestJournalsAgree = JournalsAgree.TestCase
TestJournalsAgree.settings = settings(max_examples=30, stateful_step_count=30, deadline=None, derandomize=True)
