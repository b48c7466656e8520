"""JournalContract: what every implementation of the Journal port must do."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import chain, product

import pytest

from hpstage.errors import HistoryChanged, StoreError
from hpstage.store.cursor import Cursor
from hpstage.store.journal import Journal

_WRITERS = 3
_BATCHES = 40


class JournalContract:
    """Subclass it, name the subclass ``Test...`` and override the fixture ``open_journal``.

    ``class TestMyJournal(JournalContract): ...``
    """

    between_processes = True
    """Whether the log is shared between processes and outlives its handles."""

    @pytest.fixture
    def open_journal(self) -> Callable[[], Journal]:
        """A function, sendable to another process, that opens the log of this test, empty at first.

        Each call may give a handle of its own; if ``between_processes`` is false it may give the same one.
        """
        raise NotImplementedError("override the fixture open_journal")

    @pytest.fixture
    def journal(self, open_journal: Callable[[], Journal]) -> Iterator[Journal]:
        with closing(open_journal()) as journal:
            yield journal

    def test_a_new_journal_is_empty(self, journal: Journal) -> None:
        assert len(journal) == 0
        assert journal.read() == []

    def test_append_returns_the_position_of_its_first_record(self, journal: Journal) -> None:
        assert journal.append([b"a", b"b"]) == 0
        assert journal.append([b"c"]) == 2
        assert len(journal) == 3

    def test_records_come_back_as_they_were_in_order(self, journal: Journal) -> None:
        records = [b"", b"\x00\xff", b'{"text": "\xc3\xa9"}', b"x" * 100_000, b"", b"1"]
        journal.append(records[:4])
        journal.append(records[4:])
        assert journal.read() == records
        assert all(type(record) is bytes for record in journal.read())

    def test_read_gives_a_window(self, journal: Journal) -> None:
        journal.append([b"0", b"1", b"2", b"3"])
        assert journal.read(1) == [b"1", b"2", b"3"]
        assert journal.read(1, 2) == [b"1", b"2"]
        assert journal.read(3, 10) == [b"3"]
        assert journal.read(4) == []
        assert journal.read(99) == []
        assert journal.read(0, 0) == []

    def test_an_empty_append_changes_nothing(self, journal: Journal) -> None:
        journal.append([b"a"])
        assert journal.append([]) == 1
        assert len(journal) == 1

    def test_an_append_is_refused_when_the_log_is_longer_than_expected(self, journal: Journal) -> None:
        after_a = Cursor().after([b"a"])
        assert journal.append([b"a"], expect=Cursor()) == 0
        assert journal.append([b"b"], expect=Cursor()) is None
        assert journal.append([b"b"], expect=after_a) == 1
        assert journal.append([b"c"], expect=after_a) is None
        assert journal.read() == [b"a", b"b"]
        assert journal.append([b"c", b"d"], expect=after_a.after([b"b"])) == 2

    def test_read_goes_on_behind_a_cursor(self, journal: Journal) -> None:
        records = [b"0", b"", b"2", b"\xff\x00"]
        journal.append(records[:1])
        journal.append(records[1:])
        for position in range(5):
            cursor = Cursor().after(records[:position])
            for limit in (None, 2, 0):
                found = records[position : None if limit is None else position + limit]
                assert journal.read_on(cursor, limit) == (found, cursor.after(found))

    def test_whoever_has_read_other_records_than_are_there_is_refused_and_changes_nothing(
        self, journal: Journal
    ) -> None:
        there = [b"a", b"", b"ab", b"a"]
        journal.append(there)
        for passed in chain.from_iterable(product([b"", b"a", b"ab"], repeat=length) for length in range(6)):
            cursor = Cursor().after(passed)
            if list(passed) == there[: len(passed)]:
                assert journal.read_on(cursor) == (there[len(passed) :], Cursor().after(there))
                continue
            for call in (
                partial(journal.read_on, cursor),
                partial(journal.append, [b"new"], expect=cursor),
            ):
                with pytest.raises(HistoryChanged, match=f"the {len(passed)} that this process has read"):
                    call()
        assert journal.read() == there
        assert journal.append([b"new"], expect=Cursor().after(there)) == 4

    def test_all_handles_see_the_same_log(self, open_journal: Callable[[], Journal]) -> None:
        with closing(open_journal()) as one, closing(open_journal()) as other:
            one.append([b"a"])
            assert other.read() == [b"a"]
            assert other.append([b"b"]) == 1
            assert one.read() == [b"a", b"b"]

    def test_the_log_outlives_its_handles(self, open_journal: Callable[[], Journal]) -> None:
        if not self.between_processes:
            pytest.skip("a journal within one process")
        with closing(open_journal()) as journal:
            journal.append([b"a", b"b"])
        with closing(open_journal()) as journal:
            assert journal.read() == [b"a", b"b"]
            assert journal.append([b"c"]) == 2

    def test_a_closed_journal_refuses_every_call(self, journal: Journal) -> None:
        journal.close()
        journal.close()
        for call in (
            lambda: journal.append([b"a"]),
            lambda: journal.read(),
            lambda: len(journal),
        ):
            with pytest.raises(StoreError):
                call()

    def test_threads_of_one_handle_append_in_one_order(self, journal: Journal) -> None:
        with ThreadPoolExecutor(_WRITERS) as pool:
            positions = list(pool.map(lambda writer: _append_batches(journal, writer), range(_WRITERS)))
        _check_batches(journal.read(), positions)

    def test_processes_append_in_one_order_without_gaps(self, open_journal: Callable[[], Journal]) -> None:
        if not self.between_processes:
            pytest.skip("a journal within one process")
        with multiprocessing.get_context("forkserver").Pool(_WRITERS) as pool:
            positions = pool.starmap(_append_in_process, [(open_journal, n) for n in range(_WRITERS)], 1)
            pool.close()
            pool.join()
        with closing(open_journal()) as journal:
            _check_batches(journal.read(), positions)

    def test_exactly_one_of_many_conditional_appends_wins_each_position(
        self, open_journal: Callable[[], Journal]
    ) -> None:
        def count_to_thirty(writer: int) -> int:
            won = 0
            with closing(open_journal()) as journal:
                while (length := len(journal)) < 30:
                    expect = Cursor().after([b"%d" % number for number in range(length)])
                    won += journal.append([b"%d" % length], expect=expect) is not None
            return won

        if not self.between_processes:
            pytest.skip("closing one handle may close all")
        with ThreadPoolExecutor(_WRITERS) as pool:
            won = sum(pool.map(count_to_thirty, range(_WRITERS)))
        with closing(open_journal()) as journal:
            assert journal.read() == [b"%d" % number for number in range(won)]


def _append_in_process(open_journal: Callable[[], Journal], writer: int) -> list[int]:
    with closing(open_journal()) as journal:
        return _append_batches(journal, writer)


def _append_batches(journal: Journal, writer: int) -> list[int]:
    positions = []
    for batch in range(_BATCHES):
        records = [b"%d %d %d" % (writer, batch, part) for part in range(1 + batch % 4)]
        position = journal.append(records)
        assert position is not None
        positions.append(position)
    return positions


def _check_batches(records: list[bytes], positions: list[list[int]]) -> None:
    """Every batch is whole, once, at the position returned to its writer, and each writer's batches are in order."""
    assert len(records) == len(positions) * sum(1 + batch % 4 for batch in range(_BATCHES))
    for writer, starts in enumerate(positions):
        assert starts == sorted(starts)
        for batch, start in enumerate(starts):
            expected = [b"%d %d %d" % (writer, batch, part) for part in range(1 + batch % 4)]
            assert records[start : start + len(expected)] == expected
