"""A step may attach another ``__dict__`` to an object: the next trial, and a fork, begin with the one before."""

from __future__ import annotations

from typing import Any

import pytest

from hpstage.errors import StateError
from hpstage.training.capture.world import World


class Entry:
    def __init__(self) -> None:
        self.n = 0


def begun(*objects: Any) -> World:
    world = World((), lambda: [(f"object_{index}", obj) for index, obj in enumerate(objects)])
    world.reset()
    world.begin()
    return world


def test_a_dict_that_a_trial_attaches_is_not_that_of_the_next() -> None:
    entry, kept = Entry(), {"n": 5}
    own = vars(entry)
    world = begun(entry, kept)
    entry.__dict__ = kept
    entry.n = 7
    with pytest.raises(StateError, match=r"attached another `__dict__` to object_0, which is object_1, too"):
        world.capture()
    world.reset()
    assert vars(entry) is own
    assert (own, kept) == ({"n": 0}, {"n": 5})


def test_a_fork_begins_with_the_dict_that_another_has_replaced() -> None:
    entry, kept = Entry(), {"n": 5}
    own = vars(entry)
    world = begun(entry, kept)
    entry.n = 3
    state = world.capture()
    entry.__dict__ = kept
    world.load(state)
    assert vars(entry) is own
    assert (own, kept) == ({"n": 3}, {"n": 5})


def test_a_dict_with_the_same_entries_is_another_one() -> None:
    entry, kept = Entry(), {"n": 0}
    world = begun(entry, kept)
    entry.__dict__ = kept
    with pytest.raises(StateError, match=r"attached another `__dict__` to object_0"):
        world.capture()


def test_a_dict_that_evaluation_attaches_is_detached_again() -> None:
    entry, kept = Entry(), {"n": 5}
    own = vars(entry)
    world = begun(entry, kept)
    with world.kept("evaluate()"):
        entry.__dict__ = kept
        entry.n = 7
    assert vars(entry) is own
    assert (own, kept) == ({"n": 0}, {"n": 5})


def test_a_dict_that_nothing_else_knows_counts_by_its_entries() -> None:
    entry = Entry()
    world = begun(entry)
    entry.__dict__ = {"n": 4}
    state = world.capture()
    world.reset()
    world.begin()
    world.load(state)
    assert entry.n == 4
