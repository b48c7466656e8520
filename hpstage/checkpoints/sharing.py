"""Stores leaves that several states share only once: frozen weights, buffers, optimizer state of unchanged weights.

A leaf is identified by its content (kind, dtype, shape, strides, bytes). If a process saves a leaf that an earlier
state had, too, it stores the leaf in a *part*, a checkpoint of such leaves; from then on, states refer to the part. A
part's key is a digest of its leaves, so processes that find the same leaves write the same part. Nobody has to declare
these leaves: a leaf that training changes has other content, and is stored with its state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from hpstage.checkpoints import lazy_copies
from hpstage.checkpoints.leaves import Leaf
from hpstage.checkpoints.state_tree import FlatState
from hpstage.checkpoints.store import part_key
from hpstage.plan.facts import Part, StateKey

SMALLEST = 1 << 16
"""Minimum bytes of a part: a smaller one is not worth files of its own."""
# Maximum number of leaves to remember: the last ones met.
_MOST = 1 << 15
_SEVERAL = StateKey("")
BEFORE_TRAINING = StateKey(".")
"""Stands for a state that is not saved."""


@dataclass(frozen=True, slots=True)
class Division:
    """The leaves of a state as they are stored: each in the state's own files, or in a part.

    Args:
        contents: the xxh3_128 of each leaf's bytes.
        parts: the part of each leaf that is in one, by the leaf's number.
    """

    contents: tuple[str, ...]
    parts: Mapping[int, Part]


def name_in_part(leaf: Leaf, content: str) -> str:
    """Return the name under which parts store a leaf: a digest of its kind, dtype, shape, strides and ``content``.
    ``content`` is the xxh3_128 of its bytes."""
    described = [leaf.kind, leaf.dtype, leaf.shape, leaf.strides, content]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(described))


def is_divisible(flat: FlatState) -> bool:
    """Whether a state has enough bytes for a part. The leaves of smaller states are not compared."""
    return sum(leaf.nbytes for leaf in flat.leaves) >= SMALLEST


class Sharing:
    """The leaves of a store's states that a process has seen, for storing each of them once. Thread-safe: at worst, a
    leaf is stored again."""

    def __init__(self) -> None:
        # The state that had each leaf, or _SEVERAL; the last one met at the end.
        self._met: dict[str, StateKey] = {}
        self._parts: dict[str, Part] = {}
        self._held: dict[str, Any] = {}

    def hold(self, values: Mapping[str, Any]) -> None:
        """Hold lazy copies of a state's leaves, by their names in parts, and drop those of the state before. They take
        no memory of their own as long as the model, or a copy of the state, shares it."""
        copies = {name: lazy_copies.copy(value) for name, value in values.items()}
        self._held = {name: copy for name, copy in copies.items() if copy is not None}

    def held(self, names: Collection[str]) -> dict[str, Any] | None:
        """Return lazy copies of these leaves, or ``None`` if one of them is not held."""
        held = self._held
        return {name: lazy_copies.copy(held[name]) for name in names} if held.keys() >= set(names) else None

    def meet(self, key: StateKey, names: Iterable[str]) -> None:
        """Remember leaves of a state, by their names in parts."""
        for name in names:
            self._met[name] = key if self._met.pop(name, key) == key else _SEVERAL
        if len(self._met) > _MOST:
            for name in [*self._met][:-_MOST]:
                self._met.pop(name, None)

    def place(self, part: Part, names: Iterable[str]) -> None:
        """Remember which leaves are in a part."""
        self._parts.update(dict.fromkeys(names, part))

    def forget(self, key: StateKey) -> None:
        """Forget a part, which is gone or damaged."""
        for name, part in [*self._parts.items()]:
            if part.key == key:
                self._parts.pop(name, None)

    def placed(self, names: Sequence[str]) -> dict[int, Part]:
        """Return the parts of those leaves that are in one, by their position."""
        found = ((index, self._parts.get(name)) for index, name in enumerate(names))
        return {index: part for index, part in found if part is not None}

    def to_place(self, key: StateKey, flat: FlatState, names: Sequence[str]) -> dict[str, int]:
        """Return the leaves of a state to store in a new part, as numbers by name: those that another state had, too,
        and that are in no part yet; none if they have too few bytes."""
        chosen = {
            name: index
            for index, name in enumerate(names)
            if self._met.get(name, key) != key and name not in self._parts
        }
        return chosen if sum(flat.leaves[index].nbytes for index in chosen.values()) >= SMALLEST else {}


def key_of_part(workload: str, names: Iterable[str]) -> StateKey:
    """Return the key of a workload's part that holds these leaves."""
    return part_key(xxhash.xxh3_128_hexdigest(" ".join([workload, *sorted(names)]).encode()))
