"""LiveCache: states that a worker keeps in memory, to fork them without reading their checkpoints."""

from __future__ import annotations

import threading
from collections import OrderedDict

from hpstage.checkpoints.state_tree import clone, nbytes
from hpstage.plan.facts import StateKey


class LiveCache:
    """A least-recently-used cache of states by key, limited to ``budget_bytes`` in total. Thread-safe.

    Tensors stay on their device, so the budget is that device's memory as well.
    """

    def __init__(self, budget_bytes: int = 2 << 30) -> None:
        self.budget_bytes = budget_bytes
        self._nbytes = 0
        self._states: OrderedDict[StateKey, tuple[object, int]] = OrderedDict()
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
            size = nbytes(state)
            if size > self.budget_bytes:
                return
            # Make room before copying, so that evicted states and the copy are never in memory together.
            while self._nbytes + size > self.budget_bytes:
                _, (_, freed) = self._states.popitem(last=False)
                self._nbytes -= freed
            self._states[key] = (clone(state), size)
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
        """Total bytes of all kept states."""
        with self._lock:
            return self._nbytes

    def __contains__(self, key: StateKey) -> bool:
        with self._lock:
            return key in self._states

    def __len__(self) -> int:
        with self._lock:
            return len(self._states)
