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


def test_an_object_whose_dict_one_trial_replaced_has_its_own_dict_in_the_next_trial() -> None:
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


def test_loading_a_state_restores_an_object_dict_that_later_training_replaced() -> None:
    entry, kept = Entry(), {"n": 5}
    own = vars(entry)
    world = begun(entry, kept)
    entry.n = 3
    state = world.capture()
    entry.__dict__ = kept
    world.load(state)
    assert vars(entry) is own
    assert (own, kept) == ({"n": 3}, {"n": 5})


def test_replacing_an_object_dict_by_an_equal_dict_of_another_object_is_refused() -> None:
    entry, kept = Entry(), {"n": 0}
    world = begun(entry, kept)
    entry.__dict__ = kept
    with pytest.raises(StateError, match=r"attached another `__dict__` to object_0"):
        world.capture()


def test_an_object_dict_that_evaluation_replaces_is_restored() -> None:
    entry, kept = Entry(), {"n": 5}
    own = vars(entry)
    world = begun(entry, kept)
    with world.kept("evaluate()"):
        entry.__dict__ = kept
        entry.n = 7
    assert vars(entry) is own
    assert (own, kept) == ({"n": 0}, {"n": 5})


def test_a_new_object_dict_that_nothing_else_refers_to_is_saved_by_its_entries() -> None:
    entry = Entry()
    world = begun(entry)
    entry.__dict__ = {"n": 4}
    state = world.capture()
    world.reset()
    world.begin()
    world.load(state)
    assert entry.n == 4
