"""Which checkpoints go when they take more bytes than they may. Pure: values in, a decision out.

Kept states form a forest: the parent of one is the nearest kept ancestor on its line, from which it would be trained
anew. A checkpoint that is *needed* never goes. Of the others, the one goes whose absence costs the fewest seconds per
byte freed (of those that must be freed: the rest of a large one counts for nothing). What it costs depends on what
went before it:

- It would be trained anew from its nearest ancestor that is still kept; that one moves up as ancestors go.
- Checkpoints that went from below it would pay for its training too, each of them.

So the seconds lost are, over all checkpoints that go, those from the nearest kept ancestor to each of them: as if each
were asked for once more, alone. Which of them really will be is not known; what is known to be wanted is needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import msgspec

from hpstage.errors import InternalError
from hpstage.plan.facts import StateKey


class KeptState(msgspec.Struct, frozen=True):
    """A kept state, as the decision sees it; :func:`hpstage.checkpoints.needed.kept_states` makes them of a plan."""

    key: StateKey
    parent: StateKey | None
    """The nearest kept ancestor, itself among the states decided on; ``None``: training starts from the beginning."""
    bytes: int
    """What its checkpoint takes, and so what its going frees (``Kept.bytes``)."""
    seconds: float
    """Training from the parent to this state; >= 0."""
    needed: bool
    """It must stay."""
    last_used: float = 0.0
    """When it was last saved or loaded, on any one clock. Among equals, the least recently used goes first."""


class Retention(msgspec.Struct, frozen=True):
    """A decision."""

    delete: tuple[StateKey, ...]
    """In the order of choice, cheapest first."""
    remaining: int
    """Bytes of what stays: more than the budget only where all that stays is needed."""


def decide(states: Iterable[KeptState], budget_bytes: int | None) -> Retention:
    """Choose what goes so that the rest fits into ``budget_bytes``; nothing for ``None``.

    Greedy, by seconds lost per byte freed; then whatever went in vain, since a later and larger one freed enough,
    stays after all. O(n log n) for n states, but for a state that comes to the top of the heap again each time that
    an ancestor of it has gone: O(n x height x log n) at the very worst.

    Raises:
        InternalError: the states are no forest.
    """
    forest = _Forest(list(states))
    total = sum(state.bytes for state in forest.states)
    if budget_bytes is None or total <= budget_bytes:
        return Retention(delete=(), remaining=total)
    gone = _greedy(forest, total - budget_bytes)
    remaining = total - sum(forest.states[index].bytes for index in gone)
    chosen: list[StateKey] = []
    for index in reversed(gone):  # the dearest first
        if remaining + forest.states[index].bytes <= budget_bytes:
            remaining += forest.states[index].bytes
        else:
            chosen.append(forest.states[index].key)
    return Retention(delete=tuple(reversed(chosen)), remaining=remaining)


def _greedy(forest: _Forest, excess: int) -> list[int]:
    """States in the order in which they go, until ``excess`` bytes are freed or only needed ones are left."""
    states = forest.states
    # The beginning of training, at depth 0, stands at the index after all states: it never goes.
    beginning = len(states)
    depths = [*forest.depths, 0.0]
    anchors = [beginning if parent is None else parent for parent in forest.parents]
    hanging = [1] * beginning + [0]  # states trained anew if this one goes: itself, and those that went from below it
    gone = [False] * (beginning + 1)

    def anchor(index: int) -> int:
        """The nearest ancestor that is still kept; the way there is made short for the next time."""
        way = []
        at = anchors[index]
        while gone[at]:
            way.append(at)
            at = anchors[at]
        for passed in way:
            anchors[passed] = at
        anchors[index] = at
        return at

    def price(index: int) -> tuple[float, float, StateKey, int]:
        state = states[index]
        seconds = (depths[index] - depths[anchor(index)]) * hanging[index]
        return seconds / min(state.bytes, excess), state.last_used, state.key, index

    heap = [price(index) for index, state in enumerate(states) if not state.needed and state.bytes > 0]
    heapq.heapify(heap)
    order: list[int] = []
    while excess > 0 and heap:
        entry = heap[0]
        index = entry[-1]
        # Prices only rise as others go: an entry out of date is too low, and never hides a cheaper one.
        now = price(index)
        if now > entry:
            heapq.heapreplace(heap, now)
            continue
        heapq.heappop(heap)
        hanging[anchor(index)] += hanging[index]
        gone[index] = True
        order.append(index)
        excess -= states[index].bytes
    return order


class _Forest:
    """The states with their parents as indices, and the seconds of training from the beginning to each."""

    __slots__ = ("depths", "parents", "states")

    def __init__(self, states: list[KeptState]) -> None:
        self.states = states
        index = {state.key: number for number, state in enumerate(states)}
        if len(index) != len(states):
            raise InternalError("a kept state was given twice to be decided on")
        self.parents: list[int | None] = []
        children: list[list[int]] = [[] for _ in states]
        order: list[int] = []  # parents before their children
        for number, state in enumerate(states):
            if state.parent is None:
                self.parents.append(None)
                order.append(number)
            elif state.parent in index:
                self.parents.append(index[state.parent])
                children[index[state.parent]].append(number)
            else:
                raise InternalError(f"state {state.key} has a parent that is not kept, {state.parent}")
        self.depths = [0.0] * len(states)
        for number in order:  # grows while it is walked
            parent = self.parents[number]
            self.depths[number] = states[number].seconds + (0.0 if parent is None else self.depths[parent])
            order.extend(children[number])
        if len(order) != len(states):
            raise InternalError("kept states are ancestors of themselves")
