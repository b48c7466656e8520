"""StoreContract: what a journal, leases and a snapshot in one place must do, together and each for itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count

import pytest

from hpstage.errors import HistoryChanged, LeaseLost, StoreError
from hpstage.store.cursor import Cursor
from hpstage.store.journal import Journal
from hpstage.store.store import Store
from hpstage.testing.journal import JournalContract
from hpstage.testing.leases import LeasesContract
from hpstage.testing.snapshots import SnapshotsContract

_WRITERS, _TURNS = 3, 60
_PATIENCE = 120.0
"""Seconds after which two writers should have committed on any machine."""


class StoreContract(JournalContract, LeasesContract, SnapshotsContract):
    """Subclass it, name the subclass ``Test...`` and override the fixtures ``open_store`` and ``advance``.

    ``class TestMyStore(StoreContract): ...``
    """

    @pytest.fixture
    def open_journal(self, open_store: Callable[[], Store]) -> Callable[[], Journal]:
        return open_store

    def test_a_snapshot_is_no_record_and_waits_for_no_lease(self, store: Store) -> None:
        store.append([b"a"])
        assert store.acquire("a", "me", 100) is not None
        store.write_snapshot(b"snapshot")
        assert store.read() == [b"a"] and store.append([b"b"], expect=Cursor().after([b"a"])) == 1
        assert store.read_snapshot() == b"snapshot"

    def test_an_append_is_applied_while_its_leases_are_held(self, store: Store) -> None:
        tokens = store.acquire_all(["a", "b"], "me", 100)
        assert tokens is not None
        assert store.append([b"x"], fences=tokens) == 0
        assert store.append([b"y"], fences={"b": tokens["b"]}, expect=Cursor().after([b"x"])) == 1
        assert store.read() == [b"x", b"y"]

    def test_an_append_is_refused_when_one_of_its_leases_was_taken(
        self, store: Store, advance: Callable[[float], None]
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
        self, store: Store, advance: Callable[[float], None]
    ) -> None:
        token = store.acquire("a", "me", 100)
        assert token is not None
        advance(101)
        assert store.append([b"x"], fences={"a": token}) == 0

    def test_an_append_is_refused_with_a_lease_that_was_released_or_never_given(self, store: Store) -> None:
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

    def test_lost_leases_are_reported_before_a_log_that_was_not_expected(self, store: Store) -> None:
        store.append([b"a"])
        for expect in (Cursor(), Cursor().after([b"b"])):
            with pytest.raises(LeaseLost):
                store.append([b"x"], expect=expect, fences={"a": 1})
        token = store.acquire("a", "me", 100)
        assert token is not None
        assert store.append([b"x"], expect=Cursor(), fences={"a": token}) is None
        with pytest.raises(HistoryChanged):
            store.append([b"x"], expect=Cursor().after([b"b"]), fences={"a": token})

    def test_nobody_commits_after_the_one_who_took_his_lease(self, open_store: Callable[[], Store]) -> None:
        committed: set[int] = set()
        until = time.monotonic() + _PATIENCE

        def commit_for_a_while(writer: int) -> None:
            with closing(open_store()) as store:
                for turn in count():
                    if turn >= _TURNS and (len(committed) > 1 or time.monotonic() > until):
                        return
                    # So short that it is over, now and then, before the commit; each of an owner of its own.
                    token = store.acquire("a", f"owner {writer}.{turn}", 0.0005 * 2 ** (turn % 6))
                    if token is None:
                        time.sleep(0.0005)
                        continue
                    try:
                        store.append([b"%d" % token], fences={"a": token})
                        committed.add(token)
                    except LeaseLost:
                        continue

        if not self.between_processes:
            pytest.skip("closing one handle may close all")
        with ThreadPoolExecutor(_WRITERS) as pool:
            list(pool.map(commit_for_a_while, range(_WRITERS)))
        with closing(open_store()) as store:
            tokens = list(map(int, store.read()))
        assert tokens == sorted(tokens)
        assert len(set(tokens)) > 1
