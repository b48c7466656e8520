"""The part of JournalContract about leases, and the fixtures that open the journals of its tests."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

import pytest

from hpstage.errors import UsageError
from hpstage.store.journal import Journal

R = TypeVar("R")
_OWNERS = 3
_NAMES = [f"node {number}" for number in range(60)]


class Leases:
    """Tests of leases. Their leases last at least 100 s; it is assumed that a test takes less time."""

    between_processes = True
    """Whether the journal is shared between processes and outlives its handles."""

    @pytest.fixture
    def open_store(self) -> Callable[[], Journal]:
        """A function that opens the journal of this test, which is empty at first. It can be sent to another process.

        Each call returns a new handle; if ``between_processes`` is false, calls may return the same handle.
        """
        raise NotImplementedError("override the fixture open_store")

    @pytest.fixture
    def advance(self) -> Callable[[float], None]:
        """A function that moves the clock of this test's leases forward by a number of seconds."""
        raise NotImplementedError("override the fixture advance")

    @pytest.fixture
    def store(self, open_store: Callable[[], Journal]) -> Iterator[Journal]:
        with closing(open_store()) as store:
            yield store

    def _need_processes(self) -> None:
        if not self.between_processes:
            pytest.skip("the journal is in one process, so that closing a handle may close all")

    def test_a_free_lease_can_be_acquired(self, store: Journal) -> None:
        assert store.holder("a") is None
        token = store.acquire("a", "me", 100)
        assert token is not None and token > 0
        lease = store.holder("a")
        assert lease is not None
        assert (lease.owner, lease.token) == ("me", token)
        assert 0 < lease.seconds <= 100

    def test_a_lease_held_by_another_owner_cannot_be_acquired(self, store: Journal) -> None:
        token = store.acquire("a", "me", 100)
        assert store.acquire("a", "you", 1000) is None
        lease = store.holder("a")
        assert lease is not None
        assert (lease.owner, lease.token) == ("me", token)
        assert lease.seconds <= 100

    def test_the_holder_that_acquires_again_gets_its_token_and_a_new_expiry(
        self, store: Journal, advance: Callable[[float], None]
    ) -> None:
        token = store.acquire("a", "me", 100)
        advance(80)
        assert store.acquire("a", "me", 100) == token
        advance(80)
        assert store.acquire("a", "you", 100) is None

    def test_another_owner_may_take_an_expired_lease_with_a_larger_token(
        self, store: Journal, advance: Callable[[float], None]
    ) -> None:
        mine = store.acquire("a", "me", 100)
        advance(101)
        assert store.holder("a") is None
        yours = store.acquire("a", "you", 100)
        assert mine is not None and yours is not None and yours > mine
        assert store.acquire("a", "me", 100) is None

    def test_tokens_of_a_name_grow_over_release_and_expiry_also_for_one_owner(
        self, store: Journal, advance: Callable[[float], None]
    ) -> None:
        tokens = []
        for end in (store.release, lambda *_: advance(101), store.release, lambda *_: advance(101)):
            token = store.acquire("a", "me", 100)
            assert token is not None
            tokens.append(token)
            end("a", token)
        assert sorted(set(tokens)) == tokens

    def test_renewing_puts_the_expiry_off(self, store: Journal, advance: Callable[[float], None]) -> None:
        token = store.acquire("a", "me", 100)
        assert token is not None
        advance(80)
        assert not store.renew_all({"a": token}, 100)
        advance(80)
        assert store.acquire("a", "you", 100) is None
        assert not store.renew_all({"a": token}, 10)  # the new expiry may be earlier
        advance(11)
        assert store.acquire("a", "you", 100) is not None

    def test_a_lease_that_expired_is_renewed_as_long_as_nobody_has_taken_it(
        self, store: Journal, advance: Callable[[float], None]
    ) -> None:
        token = store.acquire("a", "me", 100)
        assert token is not None
        advance(101)
        assert not store.renew_all({"a": token}, 100)
        assert store.acquire("a", "you", 100) is None
        advance(101)
        assert store.acquire("a", "you", 100) is not None
        assert store.renew_all({"a": token}, 100)

    def test_only_the_token_of_the_holder_renews_and_releases(self, store: Journal) -> None:
        token = store.acquire("a", "me", 100)
        assert token is not None
        for wrong in (token - 1, token + 1, 0):
            assert store.renew_all({"a": wrong}, 1000)
            assert not store.release("a", wrong)
        lease = store.holder("a")
        assert lease is not None and lease.seconds <= 100
        assert store.renew_all({"b": token}, 100)
        assert not store.release("b", token)
        assert store.holder("b") is None

    def test_a_released_lease_is_free_at_once(self, store: Journal) -> None:
        token = store.acquire("a", "me", 100)
        assert token is not None
        assert store.release("a", token)
        assert store.holder("a") is None
        assert not store.release("a", token)
        assert store.renew_all({"a": token}, 100)
        assert store.acquire("a", "you", 100) is not None

    def test_several_leases_are_acquired_together_or_not_at_all(self, store: Journal) -> None:
        tokens = store.acquire_all(["a", "b"], "me", 100)
        assert tokens is not None and list(tokens) == ["a", "b"]
        assert store.acquire_all(["c", "b", "d"], "you", 100) is None
        assert store.holder("c") is None
        assert store.holder("d") is None
        more = store.acquire_all(["d", "b", "a", "b"], "me", 1000)
        assert more is not None and list(more) == ["d", "b", "a"]
        assert (more["a"], more["b"]) == (tokens["a"], tokens["b"])
        assert len(set(more.values())) == 3
        lease = store.holder("a")
        assert lease is not None and lease.seconds > 100
        assert store.acquire_all([], "me", 100) == {}

    def test_a_refused_acquire_does_not_extend_held_leases(
        self, store: Journal, advance: Callable[[float], None]
    ) -> None:
        assert store.acquire("a", "me", 100) is not None
        assert store.acquire("b", "you", 1000) is not None
        assert store.acquire_all(["a", "b"], "me", 1000) is None
        advance(101)
        assert store.holder("a") is None

    def test_several_leases_are_renewed_and_released_independently(
        self, store: Journal, advance: Callable[[float], None]
    ) -> None:
        tokens = store.acquire_all(["a", "b", "c"], "me", 100)
        assert tokens is not None
        store.release("b", tokens["b"])
        assert store.acquire("b", "you", 100) is not None
        assert store.renew_all({**tokens, "d": 1}, 1000) == {"b", "d"}
        advance(101)
        assert store.acquire_all(["a"], "you", 100) is None
        assert store.acquire_all(["c"], "you", 100) is None
        assert store.release_all({**tokens, "d": 1}) == {"b", "d"}
        assert store.acquire_all(["a", "b", "c"], "you", 100) is not None
        assert store.renew_all({}, 100) == store.release_all({}) == set()

    @pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf])
    def test_the_duration_of_a_lease_must_be_positive_and_finite(self, store: Journal, seconds: float) -> None:
        with pytest.raises(UsageError, match="positive, finite"):
            store.acquire("a", "me", seconds)
        with pytest.raises(UsageError, match="positive, finite"):
            store.renew_all({"a": 1}, seconds)
        assert store.holder("a") is None

    @pytest.mark.parametrize("name", ["", " ", "a b", "{a}", "ä€\U0001f600", "a\nb", "a\x00b", "x" * 10_000])
    def test_names_and_owners_are_any_text(self, store: Journal, name: str) -> None:
        token = store.acquire(name, name, 100)
        assert token is not None
        assert store.acquire(name, name + "x", 100) is None
        lease = store.holder(name)
        assert lease is not None and lease.owner == name
        assert store.renew_all({name: token, name + "x": 1}, 100) == {name + "x"}
        assert store.release(name, token)

    def test_all_handles_see_the_same_leases(self, open_store: Callable[[], Journal]) -> None:
        with closing(open_store()) as one, closing(open_store()) as other:
            token = one.acquire("a", "me", 100)
            assert token is not None
            assert other.acquire("a", "you", 100) is None
            assert not other.renew_all({"a": token}, 100)
            assert other.release("a", token)
            assert one.holder("a") is None

    def test_exactly_one_of_many_threads_gets_each_lease(self, store: Journal) -> None:
        with ThreadPoolExecutor(_OWNERS) as pool:
            _check_shares(list(pool.map(lambda owner: _acquire_names(store, owner), range(_OWNERS))))

    def test_exactly_one_of_many_processes_gets_each_lease(self, open_store: Callable[[], Journal]) -> None:
        self._need_processes()
        _check_shares(in_processes(_acquire_names, open_store, range(_OWNERS)))


def in_processes(
    act: Callable[[Journal, int], R], open_store: Callable[[], Journal], numbers: Iterable[int]
) -> list[R]:
    """Run a function in several processes concurrently, each with a number and its own handle; return the results."""
    calls = [(act, open_store, number) for number in numbers]
    with multiprocessing.get_context("forkserver").Pool(len(calls)) as pool:
        found = pool.starmap(_with_handle, calls, 1)
        pool.close()
        pool.join()
    return found


def _with_handle(act: Callable[[Journal, int], Any], open_store: Callable[[], Journal], number: int) -> Any:
    with closing(open_store()) as store:
        return act(store, number)


def _acquire_names(store: Journal, owner: int) -> dict[str, int]:
    tokens = ((name, store.acquire(name, f"owner {owner}", 1000)) for name in _NAMES)
    return {name: token for name, token in tokens if token is not None}


def _check_shares(shares: list[dict[str, int]]) -> None:
    assert sorted(name for share in shares for name in share) == sorted(_NAMES)
    tokens = [token for share in shares for token in share.values()]
    assert len(set(tokens)) == len(_NAMES)
