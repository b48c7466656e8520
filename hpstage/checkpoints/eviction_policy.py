"""Chooses among evictable checkpoints (``evictable.py``) those that cost least to retrain, to meet a budget. Pure.

Saved states form a forest: a state's parent is its nearest saved ancestor, from which it would be retrained.
A *needed* checkpoint is never evicted. Of the others, the one is evicted whose loss costs the fewest
seconds per byte freed (counting only bytes that must be freed: the excess of a large checkpoint counts for nothing).
The cost depends on the checkpoints evicted before it:

- It would be retrained from its nearest ancestor that is still kept, which is farther up once ancestors are evicted.
- Each evicted checkpoint below it would have to repeat its training, too.

So the seconds lost are the sum, over all evicted checkpoints, of the seconds from the nearest kept ancestor to each: as
if each evicted state were requested once more, and none of them kept. Which states will be requested is unknown; those
known to be are needed.

A *part* holds leaves that several states share. Its bytes count once, and are freed with the last of these states. The
order of choice ignores parts: they hold leaves that training does not change, so rarely are all of their states
evicted.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

import msgspec

from hpstage.errors import InternalError
from hpstage.plan.facts import Part, StateKey


class KeptState(msgspec.Struct, frozen=True):
    """A saved state, as input to the decision; :func:`hpstage.checkpoints.evictable.kept_states` returns a plan's."""

    key: StateKey
    parent: StateKey | None
    """The nearest kept ancestor, which must be among the given states; ``None``: training starts from the beginning."""
    bytes: int
    """Size of its checkpoint without its parts (``Kept.own``), which evicting it frees."""
    seconds: float
    """Seconds of training from the parent to this state; >= 0."""
    needed: bool
    """Whether it must be kept."""
    parts: tuple[Part, ...] = ()
    """The parts that it shares with other states."""
    last_used: float = 0.0
    """When it was last saved or loaded, by any single clock. Ties are broken by evicting the least recently used."""


class EvictionPlan(msgspec.Struct, frozen=True):
    """The decision which checkpoints to evict."""

    delete: tuple[StateKey, ...]
    """Keys in the order of choice, cheapest first."""
    remaining: int
    """Bytes of the remaining checkpoints: more than the budget only if all of them are needed."""


def choose_evictions(states: Iterable[KeptState], budget_bytes: int | None) -> EvictionPlan:
    """Choose checkpoints to evict so that the rest fits into ``budget_bytes``; none if it is ``None``.

    Greedy: the next one is that with the least (seconds of training from its nearest kept ancestor) x (1 + evicted
    states below it) / (bytes that it frees); of equals, the least recently used. A chosen checkpoint is kept after all
    if the others free enough without it. O(n log n) for n states, except that a state may return to the top of the heap
    each time an ancestor of it is evicted: O(n x height x log n) in the worst case.

    Raises:
        InternalError: the states do not form a forest.
    """
    known = list(states)
    anchors, depths = _forest(known)
    stored = _Stored()
    for state in known:
        stored.add(state)
    if budget_bytes is None or stored.bytes <= budget_bytes:
        return EvictionPlan(delete=(), remaining=stored.bytes)
    gone = _greedy(known, anchors, depths, stored, budget_bytes)
    chosen: list[StateKey] = []
    for index in reversed(gone):  # most expensive first
        stored.add(known[index])
        if stored.bytes > budget_bytes:
            stored.remove(known[index])
            chosen.append(known[index].key)
    return EvictionPlan(delete=tuple(reversed(chosen)), remaining=stored.bytes)


class _Stored:
    """The bytes that states take, with each part once."""

    __slots__ = ("_parts", "bytes")

    def __init__(self) -> None:
        self.bytes = 0
        self._parts: Counter[StateKey] = Counter()

    def add(self, state: KeptState) -> None:
        self.bytes += state.bytes
        for part in state.parts:
            if not self._parts[part.key]:
                self.bytes += part.bytes
            self._parts[part.key] += 1

    def remove(self, state: KeptState) -> None:
        self.bytes -= state.bytes
        for part in state.parts:
            self._parts[part.key] -= 1
            if not self._parts[part.key]:
                self.bytes -= part.bytes


def _greedy(
    states: list[KeptState], anchors: list[int], depths: list[float], stored: _Stored, budget: int
) -> list[int]:
    """Choose states to remove until the others take at most ``budget`` bytes, or are all needed. Return the chosen
    states in order."""
    hanging = [1] * len(states) + [0]  # states retrained if this one is evicted: itself, and those evicted below it
    gone = [False] * len(hanging)

    def anchor(index: int) -> int:
        """Return the nearest ancestor that is still kept, and compress the path to it."""
        passed_by = []
        at = anchors[index]
        while gone[at]:
            passed_by.append(at)
            at = anchors[at]
        for passed in passed_by:
            anchors[passed] = at
        anchors[index] = at
        return at

    def cost_per_byte(index: int) -> tuple[float, float, StateKey, int]:
        state = states[index]
        seconds = (depths[index] - depths[anchor(index)]) * hanging[index]
        return seconds / min(state.bytes, stored.bytes - budget), state.last_used, state.key, index

    heap = [cost_per_byte(index) for index, state in enumerate(states) if not state.needed and state.bytes > 0]
    heapq.heapify(heap)
    order: list[int] = []
    while stored.bytes > budget and heap:
        entry = heap[0]
        index = entry[-1]
        # Costs only rise as others are evicted: an outdated entry is too low, and never hides a cheaper one.
        now = cost_per_byte(index)
        if now > entry:
            heapq.heapreplace(heap, now)
            continue
        heapq.heappop(heap)
        hanging[anchor(index)] += hanging[index]
        gone[index] = True
        order.append(index)
        stored.remove(states[index])
    return order


def _forest(states: list[KeptState]) -> tuple[list[int], list[float]]:
    """Return the index of each state's parent, and its seconds of training from the beginning, which is never evicted
    and has the index after all states."""
    beginning = len(states)
    index: dict[StateKey | None, int] = {state.key: number for number, state in enumerate(states)}
    if len(index) != beginning:
        raise InternalError("a saved state was given twice")
    index[None] = beginning
    children: list[list[int]] = [[] for _ in range(beginning + 1)]
    for number, state in enumerate(states):
        if state.parent not in index:
            raise InternalError(f"state {state.key} has a parent that is not saved, {state.parent}")
        children[index[state.parent]].append(number)
    depths = [0.0] * (beginning + 1)
    order = [beginning]  # parents before their children
    for number in order:  # grows while it is walked
        for child in children[number]:
            depths[child] = states[child].seconds + depths[number]
        order.extend(children[number])
    if len(order) != beginning + 1:
        raise InternalError("saved states are ancestors of themselves")
    return [index[state.parent] for state in states], depths
