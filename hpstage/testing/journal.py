"""JournalContract: the obligations of every implementation of the Journal port."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import chain, count, product

import pytest

from hpstage.errors import HistoryChanged, LeaseLost, StoreError
from hpstage.store.cursor import Cursor
from hpstage.store.journal import Journal
from hpstage.testing.leases import Leases, in_processes

_WRITERS = 3
_BATCHES = 40
_TURNS = 60
_PATIENCE = 120.0
"""Seconds in which two writers should have committed on any machine."""
_WRITES = 10
"""Number of snapshots written by each writer."""
_LARGE = 5_000_000
"""Bytes of a snapshot so large that a store may write it in parts."""


class JournalContract(Leases):
    """Subclass it, name the subclass ``Test...`` and override the fixtures ``open_store`` and ``advance``.

    ``class TestMyJournal(JournalContract): ...``
    """

    # --- the log ------------------------------------------------------------------------------------------

    def test_a_new_journal_is_empty(self, store: Journal) -> None:
        assert len(store) == 0
        assert store.read() == []

    def test_append_returns_the_position_of_its_first_record(self, store: Journal) -> None:
        assert store.append([b"a", b"b"]) == 0
        assert store.append([b"c"]) == 2
        assert len(store) == 3

    def test_records_come_back_as_they_were_in_order(self, store: Journal) -> None:
        records = [b"", b"\x00\xff", b'{"text": "\xc3\xa9"}', b"x" * 100_000, b"", b"1"]
        store.append(records[:4])
        store.append(records[4:])
        assert store.read() == records
        assert all(type(record) is bytes for record in store.read())

    def test_read_gives_a_window(self, store: Journal) -> None:
        store.append([b"0", b"1", b"2", b"3"])
        assert store.read(1) == [b"1", b"2", b"3"]
        assert store.read(1, 2) == [b"1", b"2"]
        assert store.read(3, 10) == [b"3"]
        assert store.read(4) == []
        assert store.read(99) == []
        assert store.read(0, 0) == []

    def test_an_empty_append_changes_nothing(self, store: Journal) -> None:
        store.append([b"a"])
        assert store.append([]) == 1
        assert len(store) == 1

    def test_an_append_is_refused_when_the_log_is_longer_than_expected(self, store: Journal) -> None:
        after_a = Cursor().after([b"a"])
        assert store.append([b"a"], expect=Cursor()) == 0
        assert store.append([b"b"], expect=Cursor()) is None
        assert store.append([b"b"], expect=after_a) == 1
        assert store.append([b"c"], expect=after_a) is None
        assert store.read() == [b"a", b"b"]
        assert store.append([b"c", b"d"], expect=after_a.after([b"b"])) == 2

    def test_read_on_continues_after_a_cursor(self, store: Journal) -> None:
        records = [b"0", b"", b"2", b"\xff\x00"]
        store.append(records[:1])
        store.append(records[1:])
        for position in range(5):
            cursor = Cursor().after(records[:position])
            for limit in (None, 2, 0):
                found = records[position : None if limit is None else position + limit]
                assert store.read_on(cursor, limit) == (found, cursor.after(found))

    def test_a_cursor_of_other_records_than_the_journal_holds_is_refused_and_changes_nothing(
        self, store: Journal
    ) -> None:
        there = [b"a", b"", b"ab", b"a"]
        store.append(there)
        for passed in chain.from_iterable(product([b"", b"a", b"ab"], repeat=length) for length in range(6)):
            cursor = Cursor().after(passed)
            if list(passed) == there[: len(passed)]:
                assert store.read_on(cursor) == (there[len(passed) :], Cursor().after(there))
                continue
            for call in (
                partial(store.read_on, cursor),
                partial(store.append, [b"new"], expect=cursor),
            ):
                with pytest.raises(HistoryChanged, match=f"the {len(passed)} that this process has read"):
                    call()
        assert store.read() == there
        assert store.append([b"new"], expect=Cursor().after(there)) == 4

    def test_all_handles_see_the_same_log(self, open_store: Callable[[], Journal]) -> None:
        with closing(open_store()) as one, closing(open_store()) as other:
            one.append([b"a"])
            assert other.read() == [b"a"]
            assert other.append([b"b"]) == 1
            assert one.read() == [b"a", b"b"]

    def test_records_leases_and_snapshot_outlive_their_handles(self, open_store: Callable[[], Journal]) -> None:
        self._need_processes()
        with closing(open_store()) as store:
            store.append([b"a", b"b"])
            token = store.acquire("a", "me", 100)
            store.write_snapshot(b"kept")
        with closing(open_store()) as store:
            assert store.read() == [b"a", b"b"]
            assert store.append([b"c"]) == 2
            assert store.acquire("a", "you", 100) is None
            assert store.acquire("a", "me", 100) == token
            assert store.read_snapshot() == b"kept"

    def test_a_closed_journal_refuses_every_call(self, open_store: Callable[[], Journal]) -> None:
        store = open_store()
        store.close()
        store.close()
        for call in (
            lambda: store.append([b"a"]),
            lambda: store.read(),
            lambda: len(store),
            lambda: store.acquire("a", "me", 100),
            lambda: store.renew_all({"a": 1}, 100),
            lambda: store.release("a", 1),
            lambda: store.holder("a"),
            lambda: store.write_snapshot(b"a"),
            lambda: store.read_snapshot(),
        ):
            with pytest.raises(StoreError):
                call()

    def test_threads_of_one_handle_append_in_one_order(self, store: Journal) -> None:
        with ThreadPoolExecutor(_WRITERS) as pool:
            positions = list(pool.map(lambda writer: _append_batches(store, writer), range(_WRITERS)))
        _check_batches(store.read(), positions)

    def test_processes_append_in_one_order_without_gaps(self, open_store: Callable[[], Journal]) -> None:
        self._need_processes()
        positions = in_processes(_append_batches, open_store, range(_WRITERS))
        with closing(open_store()) as store:
            _check_batches(store.read(), positions)

    def test_exactly_one_of_many_conditional_appends_wins_each_position(
        self, open_store: Callable[[], Journal]
    ) -> None:
        def count_to_thirty(writer: int) -> int:
            won = 0
            with closing(open_store()) as store:
                while (length := len(store)) < 30:
                    expect = Cursor().after([b"%d" % number for number in range(length)])
                    won += store.append([b"%d" % length], expect=expect) is not None
            return won

        self._need_processes()
        with ThreadPoolExecutor(_WRITERS) as pool:
            won = sum(pool.map(count_to_thirty, range(_WRITERS)))
        with closing(open_store()) as store:
            assert store.read() == [b"%d" % number for number in range(won)]

    # --- the snapshot -------------------------------------------------------------------------------------

    def test_there_is_no_snapshot_at_first(self, store: Journal) -> None:
        assert store.read_snapshot() is None

    def test_a_snapshot_comes_back_as_it_was(self, store: Journal) -> None:
        content = random.Random(0).randbytes(_LARGE)
        for length in (0, 1, 1_000, 1 << 20, 1 << 21, _LARGE, 10):
            store.write_snapshot(content[:length])
            assert store.read_snapshot() == content[:length]

    def test_all_handles_see_the_last_snapshot(self, open_store: Callable[[], Journal]) -> None:
        with closing(open_store()) as one, closing(open_store()) as other:
            one.write_snapshot(b"first")
            assert other.read_snapshot() == b"first"
            other.write_snapshot(b"second")
            assert one.read_snapshot() == b"second"

    def test_threads_of_one_handle_read_whole_snapshots_while_others_write(self, store: Journal) -> None:
        store.write_snapshot(_content(0, 0))
        done = threading.Event()

        def read() -> int:
            seen = set()
            while not done.is_set():
                seen.add(_check(store.read_snapshot()))
            return len(seen)

        with ThreadPoolExecutor(2 * _WRITERS) as pool:
            reading = [pool.submit(read) for _ in range(_WRITERS)]
            try:
                list(pool.map(lambda writer: _write(store, writer), range(_WRITERS)))
            finally:
                done.set()
            assert all(each.result() for each in reading)

    def test_processes_read_whole_snapshots_while_others_write(self, open_store: Callable[[], Journal]) -> None:
        self._need_processes()
        with closing(open_store()) as store, ThreadPoolExecutor(1) as waiting:
            writing = waiting.submit(in_processes, _write, open_store, range(_WRITERS))
            while not writing.done():
                _check(store.read_snapshot())
            writing.result()
            assert _check(store.read_snapshot()) is not None

    # --- together -----------------------------------------------------------------------------------------

    def test_a_snapshot_adds_no_record_and_needs_no_lease(self, store: Journal) -> None:
        store.append([b"a"])
        assert store.acquire("a", "me", 100) is not None
        store.write_snapshot(b"snapshot")
        assert store.read() == [b"a"] and store.append([b"b"], expect=Cursor().after([b"a"])) == 1
        assert store.read_snapshot() == b"snapshot"

    def test_an_append_is_applied_while_its_leases_are_held(self, store: Journal) -> None:
        tokens = store.acquire_all(["a", "b"], "me", 100)
        assert tokens is not None
        assert store.append([b"x"], fences=tokens) == 0
        assert store.append([b"y"], fences={"b": tokens["b"]}, expect=Cursor().after([b"x"])) == 1
        assert store.read() == [b"x", b"y"]

    def test_an_append_is_refused_when_one_of_its_leases_was_taken(
        self, store: Journal, advance: Callable[[float], None]
    ) -> None:
        tokens = store.acquire_all(["a", "b", "c"], "me", 100)
        assert tokens is not None
        advance(101)
        assert store.acquire_all(["c", "b"], "you", 100) is not None
        with pytest.raises(LeaseLost, match="'b', 'c'") as refused:
            store.append([b"x"], fences=tokens)
        assert refused.value.names == ("b", "c")
        assert isinstance(refused.value, StoreError)
        assert len(store) == 0
        assert store.append([b"x"], fences={"a": tokens["a"]}) == 0

    def test_an_append_is_applied_after_the_expiry_of_a_lease_that_nobody_has_taken(
        self, store: Journal, advance: Callable[[float], None]
    ) -> None:
        token = store.acquire("a", "me", 100)
        assert token is not None
        advance(101)
        assert store.append([b"x"], fences={"a": token}) == 0

    def test_an_append_is_refused_with_a_lease_that_was_released_or_never_given(self, store: Journal) -> None:
        token = store.acquire("a", "me", 100)
        assert token is not None
        store.release("a", token)
        for fences in ({"a": token}, {"b": token}, {"a": 0}):
            with pytest.raises(LeaseLost):
                store.append([b"x"], fences=fences)
        new = store.acquire("a", "me", 100)
        assert new is not None
        with pytest.raises(LeaseLost):
            store.append([b"x"], fences={"a": token})
        assert store.append([b"x"], fences={"a": new}) == 0

    def test_lost_leases_are_reported_before_a_log_that_was_not_expected(self, store: Journal) -> None:
        store.append([b"a"])
        for expect in (Cursor(), Cursor().after([b"b"])):
            with pytest.raises(LeaseLost):
                store.append([b"x"], expect=expect, fences={"a": 1})
        token = store.acquire("a", "me", 100)
        assert token is not None
        assert store.append([b"x"], expect=Cursor(), fences={"a": token}) is None
        with pytest.raises(HistoryChanged):
            store.append([b"x"], expect=Cursor().after([b"b"]), fences={"a": token})

    def test_appends_under_a_lease_are_in_the_order_of_its_tokens(self, open_store: Callable[[], Journal]) -> None:
        committed: set[int] = set()
        until = time.monotonic() + _PATIENCE

        def commit_for_a_while(writer: int) -> None:
            with closing(open_store()) as store:
                for turn in count():
                    if turn >= _TURNS and (len(committed) > 1 or time.monotonic() > until):
                        return
                    # Each lease has a new owner, and is so short that it sometimes expires before the commit.
                    token = store.acquire("a", f"owner {writer}.{turn}", 0.0005 * 2 ** (turn % 6))
                    if token is None:
                        time.sleep(0.0005)
                        continue
                    try:
                        store.append([b"%d" % token], fences={"a": token})
                        committed.add(token)
                    except LeaseLost:
                        continue

        self._need_processes()
        with ThreadPoolExecutor(_WRITERS) as pool:
            list(pool.map(commit_for_a_while, range(_WRITERS)))
        with closing(open_store()) as store:
            tokens = list(map(int, store.read()))
        assert tokens == sorted(tokens)
        assert len(set(tokens)) > 1


def _append_batches(store: Journal, writer: int) -> list[int]:
    positions = []
    for batch in range(_BATCHES):
        records = [b"%d %d %d" % (writer, batch, part) for part in range(1 + batch % 4)]
        position = store.append(records)
        assert position is not None
        positions.append(position)
    return positions


def _check_batches(records: list[bytes], positions: list[list[int]]) -> None:
    """Check that every batch is in the log exactly once, as a whole, at the position returned to its writer, and that
    each writer's batches are in order."""
    assert len(records) == len(positions) * sum(1 + batch % 4 for batch in range(_BATCHES))
    for writer, starts in enumerate(positions):
        assert starts == sorted(starts)
        for batch, start in enumerate(starts):
            expected = [b"%d %d %d" % (writer, batch, part) for part in range(1 + batch % 4)]
            assert records[start : start + len(expected)] == expected


def _content(writer: int, number: int) -> bytes:
    return b"%03d%03d" % (writer, number) * (_LARGE // 20 + 1_000 * writer)


def _check(content: bytes | None) -> bytes | None:
    """Check that a snapshot was written as a whole. Return its first bytes, which identify it."""
    if content is not None:
        assert content == _content(int(content[:3]), int(content[3:6])), "parts of several snapshots"
    return content and content[:6]


def _write(store: Journal, writer: int) -> None:
    for number in range(_WRITES):
        store.write_snapshot(_content(writer, number))
