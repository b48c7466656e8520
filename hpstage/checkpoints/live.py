"""LiveCache: states that a worker keeps in memory, to fork them without reading their checkpoints."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from hpstage.checkpoints.state_tree import FlatState, Room, flatten, nbytes
from hpstage.plan.facts import StateKey


class LiveCache:
    """A cache of states by key, limited to ``budget_bytes`` in total. Thread-safe.

    States that are not expected to be needed are evicted first, the least recently used before the others; then the one
    that is needed last. Tensors stay on their device, so the budget is that device's memory as well.
    """

    def __init__(self, budget_bytes: int = 2 << 30) -> None:
        self.budget_bytes = budget_bytes
        self._nbytes = 0
        self._states: OrderedDict[StateKey, tuple[object, int]] = OrderedDict()
        self._expected: dict[StateKey, None] = {}  # soonest first
        self._room: tuple[Room, int] | None = None  # for the next copy
        self._lock = threading.Lock()

    def put(self, key: StateKey, state: object) -> None:
        """Keep a deep copy of ``state``, unless it is larger than the budget.

        A key that is already kept is only marked as used: equal keys mean equal states. Raises
        :class:`StateError`.
        """
        with self._lock:
            if key in self._states:
                self._states.move_to_end(key)
                return
            flat = flatten(state)
            size = flat.nbytes
            if size <= self.budget_bytes:
                self._keep(key, flat, size)

    def copy(self, key: StateKey, flat: FlatState, size: int) -> object:
        """Return a deep copy of a state of ``size`` bytes, and keep it if :meth:`put` would. It must not change."""
        with self._lock:
            if key not in self._states and size <= self.budget_bytes:
                return self._keep(key, flat, size)
            return self._copied(flat)

    def expect(self, keys: Sequence[StateKey]) -> None:
        """Set which states will be needed, soonest first."""
        with self._lock:
            self._expected = dict.fromkeys(keys)

    def adopt(self, key: StateKey, state: object) -> None:
        """Keep a state that nobody else uses, without a copy, unless those needed sooner leave no room for it."""
        size = nbytes(state)
        with self._lock:
            if key in self._states or size > self.budget_bytes:
                return
            order = [*self._unexpected(), *reversed(self._after(key))]
            if self._nbytes - sum(self._states[other][1] for other in order) + size > self.budget_bytes:
                return
            self._make_room(size, order)
            self._states[key] = state, size
            self._nbytes += size

    def prepare(self, state: object, size: int) -> None:
        """Make memory for the copy of another state like this one, which :meth:`copy` has returned and nobody else
        uses. It is made while other threads may use the cache."""
        flat = flatten(state)
        with self._lock:
            if self._room is not None and self._room[0].leaves == flat.leaves:
                return
            self._drop_room()
            if size > self.budget_bytes:
                self._room = Room(flat.leaves, flat.values), 0  # it is not kept: the next one takes its place
                return
            if 2 * size > self.budget_bytes:
                return
            self._make_room(size, self._unexpected())
        room = flat.room()
        with self._lock:
            if self._room is None and self._nbytes + size <= self.budget_bytes:
                self._room = room, size
                self._nbytes += size

    def get(self, key: StateKey) -> object | None:
        """Return the kept state itself, or ``None``. It must not be modified: copy what you load from it."""
        with self._lock:
            if key not in self._states:
                return None
            self._states.move_to_end(key)
            return self._states[key][0]

    @property
    def nbytes(self) -> int:
        """Total bytes of all kept states, and of what was prepared for the next one."""
        with self._lock:
            return self._nbytes

    def __contains__(self, key: StateKey) -> bool:
        with self._lock:
            return key in self._states

    def __len__(self) -> int:
        with self._lock:
            return len(self._states)

    def _keep(self, key: StateKey, flat: FlatState, size: int) -> object:
        if self._room is not None and self._room[0].leaves != flat.leaves:
            self._drop_room()
        # Make room before copying, so that evicted states and the copy are never in memory together.
        self._make_room(0 if self._room is not None else size, [*self._unexpected(), *reversed(self._after(None))])
        copy = self._copied(flat)
        self._states[key] = copy, size
        self._nbytes += size
        return copy

    def _copied(self, flat: FlatState) -> object:
        room = self._room
        if room is None or room[0].leaves != flat.leaves:
            return flat.copied()
        self._drop_room()
        return flat.copied(room[0])

    def _drop_room(self) -> None:
        if self._room is not None:
            self._nbytes -= self._room[1]
            self._room = None

    def _make_room(self, size: int, order: Iterable[StateKey]) -> None:
        """Evict states in this order until ``size`` more bytes fit, or none is left."""
        for key in order:
            if self._nbytes + size <= self.budget_bytes:
                return
            self._nbytes -= self._states.pop(key)[1]

    def _unexpected(self) -> list[StateKey]:
        """Return the states that are not expected to be needed, the least recently used first."""
        return [key for key in self._states if key not in self._expected]

    def _after(self, key: StateKey | None) -> list[StateKey]:
        """Return the states that are expected to be needed later than one, soonest first; all if it is ``None``, and
        none if it is not expected."""
        kept = [other for other in self._expected if other in self._states or other == key]
        if key is None:
            return kept
        return kept[kept.index(key) + 1 :] if key in kept else []
