"""A state that no capture has written, from a damaged or forged checkpoint, is an error by name, and runs nothing."""

from __future__ import annotations

import builtins
import os
import subprocess
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest

from hpstage.checkpoints.state_tree import digest, reread
from hpstage.errors import HpstageError, StateError
from hpstage.execution.position import Position
from hpstage.plan.facts import StateKey
from hpstage.training.capture.world import World
from tests.torch.many_kinds import Trained
from tests.torch.trainables import Small, advance, fresh, hp_at, ordinary_loop, outcome

OTHERS = (None, -1, 10**12, "no such", b"x", [], {}, (), ("again", 99), ("@", "self.model"), ("named", "os", "system"))
"""What stands in the place of a part of a state."""
ALL = 100
_MOST = 12
"""Of a longer list, such as the state of a generator, the first items."""


def mutants(tree: Any, depth: int = ALL) -> Iterator[Any]:
    """Yield a state with each of its parts left out, or replaced by something else, down to a depth."""
    yield from (other for other in OTHERS if type(other) is not type(tree) or other != tree)
    if depth and isinstance(tree, dict):
        for key, item in tree.items():
            yield {name: value for name, value in tree.items() if name != key}
            yield from ({**tree, key: mutant} for mutant in mutants(item, depth - 1))
    elif depth and isinstance(tree, list | tuple):
        for index, item in enumerate(tree[:_MOST]):
            before, after = tree[:index], tree[index + 1 :]
            yield before + after
            yield from (before + type(tree)([mutant]) + after for mutant in mutants(item, depth - 1))


@pytest.fixture
def world() -> World:
    trained = Trained()
    world = World((), lambda: [("self", trained)])
    world.reset()
    world.begin()
    trained.step()
    return world


def noted(patched: pytest.MonkeyPatch) -> list[str]:
    """Return the names of what is called from now on that would run a program or a text."""
    met: list[str] = []
    for module, name in ((os, "system"), (os, "popen"), (subprocess, "Popen"), (builtins, "eval"), (builtins, "exec")):
        patched.setattr(module, name, lambda *_, name=name, **__: met.append(name))
    return met


def is_refused(mutant: Any, load: Callable[[Any], None]) -> bool:
    try:
        load(mutant)
    except HpstageError:
        return True
    return False


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 61])
def test_a_captured_state_with_any_part_damaged_is_loaded_or_refused_and_runs_no_code(
    every: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: Any = reread(world.capture())
    world.load(state)
    expected = digest(world.capture())
    with monkeypatch.context() as patched:
        met = noted(patched)
        outcomes = [is_refused(mutant, world.load) for mutant in islice(mutants(state), 0, None, every)]
    assert met == []
    assert sum(outcomes) > len(outcomes) / 2
    world.load(state)
    assert digest(world.capture()) == expected


@pytest.mark.parametrize("make", [Small, lambda: ordinary_loop], ids=["class", "function"])
def test_a_state_of_a_trainable_with_any_part_damaged_is_loaded_or_refused(make: Callable[[], object]) -> None:
    trainable = advance(fresh(make()), 0, 2)
    state = reread(trainable.state_dict())
    expected = outcome(advance(trainable, 2, 3))

    def load(mutant: Any) -> None:
        trainable.setup(hp_at(0))
        trainable.load_state_dict(mutant)

    outcomes = [is_refused(mutant, load) for mutant in mutants(state, 1)]
    assert sum(outcomes) > len(outcomes) / 2
    load(state)
    assert outcome(advance(trainable, 2, 3)) == expected


class Kept:
    """Checkpoints, and states in memory, of one state."""

    def __init__(self, state: object) -> None:
        self.state = state

    def find(self, key: StateKey) -> object:
        return self.state


def test_the_error_for_a_malformed_state_names_its_key_in_the_store() -> None:
    trainable = advance(fresh(Small()), 0, 2)
    state: Any = reread(trainable.state_dict())
    del state["memory"]
    key = StateKey("0" * 31 + "a")
    position = Position(trainable, None, None, Kept(state).find)  # type: ignore[arg-type]
    with pytest.raises(StateError, match=rf"^state {key} of the store cannot be loaded: ") as caught:
        position.go_to(key, hp_at(0))
    assert caught.value.__cause__ is not None
