"""SnapshotsContract: what every implementation of the Snapshots port must do."""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from hpstage.errors import StoreError
from hpstage.store.store import Store

_WRITERS = 3
_WRITES = 10
# Large enough for a store that writes in parts.
_LARGE = 5_000_000


class SnapshotsContract:
    """Subclass it, name the subclass ``Test...`` and override the fixture ``open_store``.

    ``class TestMySnapshots(SnapshotsContract): ...``
    """

    between_processes = True
    """Whether the snapshot is shared between processes and outlives its handles."""

    @pytest.fixture
    def open_store(self) -> Callable[[], Store]:
        """A function, sendable to another process, that opens the store of this test, empty at first.

        Each call may give a handle of its own; if ``between_processes`` is false it may give the same one.
        """
        raise NotImplementedError("override the fixture open_store")

    @pytest.fixture
    def store(self, open_store: Callable[[], Store]) -> Iterator[Store]:
        with closing(open_store()) as store:
            yield store

    def test_there_is_no_snapshot_at_first(self, store: Store) -> None:
        assert store.read_snapshot() is None

    def test_a_snapshot_comes_back_as_it_was(self, store: Store) -> None:
        content = random.Random(0).randbytes(_LARGE)
        for length in (0, 1, 1_000, 1 << 20, 1 << 21, _LARGE, 10):
            store.write_snapshot(content[:length])
            assert store.read_snapshot() == content[:length]

    def test_all_handles_see_the_last_snapshot(self, open_store: Callable[[], Store]) -> None:
        with closing(open_store()) as one, closing(open_store()) as other:
            one.write_snapshot(b"first")
            assert other.read_snapshot() == b"first"
            other.write_snapshot(b"second")
            assert one.read_snapshot() == b"second"

    def test_a_snapshot_outlives_its_handles(self, open_store: Callable[[], Store]) -> None:
        if not self.between_processes:
            pytest.skip("snapshots within one process")
        with closing(open_store()) as store:
            store.write_snapshot(b"kept")
        with closing(open_store()) as store:
            assert store.read_snapshot() == b"kept"

    def test_a_closed_handle_refuses_every_call(self, open_store: Callable[[], Store]) -> None:
        store = open_store()
        store.close()
        with pytest.raises(StoreError):
            store.write_snapshot(b"a")
        with pytest.raises(StoreError):
            store.read_snapshot()

    def test_threads_of_one_handle_read_whole_snapshots_while_others_write(self, store: Store) -> None:
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

    def test_processes_read_whole_snapshots_while_others_write(self, open_store: Callable[[], Store]) -> None:
        if not self.between_processes:
            pytest.skip("snapshots within one process")
        with multiprocessing.get_context("forkserver").Pool(_WRITERS) as pool, closing(open_store()) as store:
            writing = pool.starmap_async(_write_in_process, [(open_store, n) for n in range(_WRITERS)], 1)
            while not writing.ready():
                _check(store.read_snapshot())
            writing.get()
            pool.close()
            pool.join()
            assert _check(store.read_snapshot()) is not None


def _content(writer: int, number: int) -> bytes:
    return b"%03d%03d" % (writer, number) * (_LARGE // 20 + 1_000 * writer)


def _check(content: bytes | None) -> bytes | None:
    """Return the name of a whole snapshot."""
    if content is not None:
        assert content == _content(int(content[:3]), int(content[3:6])), "parts of several"
    return content and content[:6]


def _write(store: Store, writer: int) -> None:
    for number in range(_WRITES):
        store.write_snapshot(_content(writer, number))


def _write_in_process(open_store: Callable[[], Store], writer: int) -> None:
    with closing(open_store()) as store:
        _write(store, writer)
