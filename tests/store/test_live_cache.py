"""The live cache keeps copies within its budget and lets the least recently used go."""

from __future__ import annotations

import numpy as np

from hpstage.checkpoints import LiveCache
from hpstage.checkpoints.state_tree import nbytes
from hpstage.plan.facts import StateKey

A, B, C, D = (StateKey(letter * 32) for letter in "abcd")


def state(value: float, length: int = 1000) -> dict[str, np.ndarray]:
    return {"w": np.full(length, value)}


SIZE = nbytes(state(0))


def test_what_is_kept_does_not_change_with_the_live_state() -> None:
    cache, live = LiveCache(), state(1)
    cache.put(A, live)
    live["w"] += 1
    kept = cache.get(A)
    assert isinstance(kept, dict)
    assert kept["w"][0] == 1
    assert cache.get(A) is kept
    assert cache.get(B) is None


def test_the_least_recently_used_state_goes_first() -> None:
    cache = LiveCache(3 * SIZE)
    for key in (A, B, C):
        cache.put(key, state(1))
    cache.get(A)
    cache.put(D, state(1))
    assert [key in cache for key in (A, B, C, D)] == [True, False, True, True]
    cache.put(C, state(1))
    cache.put(B, state(1))
    assert [key in cache for key in (A, B, C, D)] == [False, True, True, True]


def test_the_budget_holds_and_the_count_is_exact() -> None:
    cache = LiveCache(3 * SIZE)
    for number in range(20):
        cache.put(StateKey(f"{number:032x}"), state(number, 100 * (number % 7)))
        assert cache.nbytes <= 3 * SIZE
        kept = [cache.get(StateKey(f"{other:032x}")) for other in range(20)]
        assert cache.nbytes == sum(nbytes(each) for each in kept if each is not None)


def test_a_state_larger_than_the_budget_is_not_kept_and_displaces_nothing() -> None:
    cache = LiveCache(2 * SIZE)
    cache.put(A, state(1))
    cache.put(B, state(1, 3000))
    assert B not in cache
    assert A in cache


def test_a_key_that_is_kept_is_not_counted_twice() -> None:
    cache = LiveCache()
    cache.put(A, state(1))
    cache.put(A, state(1))
    assert cache.nbytes == SIZE
