"""LiveCache: states that a worker keeps in memory, to fork them without reading their checkpoints."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from hpstage.checkpoints.host_memory import HostMemory, give_back
from hpstage.checkpoints.on_device import CudaMover, Mover
from hpstage.checkpoints.state_tree import FlatState, Room, flatten, nbytes
from hpstage.plan.facts import StateKey


class _Held(NamedTuple):
    state: object
    nbytes: int
    wait: Callable[[], object] | None = None
    """Returns once the state is complete, if it is being copied."""


class _Tier(OrderedDict[StateKey, _Held]):
    """States in one kind of memory, the least recently used first. Not thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes
        self.nbytes = 0

    def fits(self, size: int) -> bool:
        return self.nbytes + size <= self.budget_bytes

    def add(self, key: StateKey, held: _Held) -> None:
        self[key] = held
        self.nbytes += held.nbytes

    def remove(self, key: StateKey) -> _Held:
        held = self.pop(key)
        self.nbytes -= held.nbytes
        return held


class LiveCache:
    """A cache of states by key, in two tiers with a budget each. Thread-safe.

    Tensors stay on their device: a state with any there is in the device's tier, from which it moves to that of the
    host; all others are in the host's, from which they are dropped. States that are not expected to be needed are
    evicted first, the least recently used before the others; then the one that is needed last.

    Args:
        host_bytes: budget for states in host memory.
        device_bytes: budget for states on devices, which takes of the memory that training has.
        mover: copies states from the device.
        memory: of the host. Where that is short, no states are kept there.
    """

    def __init__(
        self,
        host_bytes: int = 2 << 30,
        device_bytes: int = 2 << 30,
        *,
        mover: Mover | None = None,
        memory: HostMemory | None = None,
    ) -> None:
        self._memory = memory
        self._size = 0  # of the last state
        self._host = _Tier(host_bytes)
        self._device = _Tier(device_bytes)
        self._mover: Mover = CudaMover() if mover is None else mover
        self._expected: dict[StateKey, None] = {}  # soonest first
        self._room: tuple[Room, int] | None = None  # for the next copy in host memory
        self._lock = threading.Lock()

    def put(self, key: StateKey, state: object) -> None:
        """Keep a deep copy of ``state``, unless it is larger than the budget.

        A key that is already kept is only marked as used: equal keys mean equal states. Raises
        :class:`StateError`.
        """
        with self._lock:
            if self._find(key) is not None:
                return
            flat = flatten(state)
            size = self._size = flat.nbytes
            tier = self._tier_of(flat)
            if size <= tier.budget_bytes and (tier is self._device or self.has_room()):
                self._keep(key, flat, size, tier)

    def has_room(self, size: int | None = None) -> bool:
        """Whether memory has room for a copy of a state of ``size`` bytes; by default one like the last."""
        if size is not None:
            self._size = size
        return self._memory is None or self._memory.has_room(self._size)

    def relieve(self) -> None:
        """Give memory back where it is short: states that are kept there, and what has been freed."""
        if not self.has_room():
            with self._lock:
                self._drop_room()
                self._make_room(self._host, self._host.budget_bytes, [*self._host])
            give_back()

    def copy(self, key: StateKey, flat: FlatState, size: int) -> tuple[object, Callable[[], object] | None]:
        """Return a deep copy of a state of ``size`` bytes in host memory, and what waits until it is complete. Keep a
        copy if :meth:`put` would. It must not be modified."""
        with self._lock:
            tier = self._tier_of(flat)
            if self._find(key) is None and size <= tier.budget_bytes:
                copy = self._keep(key, flat, size, tier)
            else:
                copy = self._copied(flat)
            return (copy, None) if tier is self._host else self._mover.to_host(flatten(copy))

    def expect(self, keys: Sequence[StateKey]) -> None:
        """Set which states will be needed, soonest first."""
        with self._lock:
            self._expected = dict.fromkeys(keys)

    def adopt(self, key: StateKey, state: object) -> None:
        """Keep a state in host memory that nobody else uses, without a copy, unless those needed sooner leave no room
        for it."""
        with self._lock:
            if self._find(key) is None and self.has_room():
                self._hold_on_host(key, nbytes(state), lambda: (state, None))

    def prepare(self, state: object, size: int) -> None:
        """Make memory for the copy of another state like this one, which :meth:`copy` has returned and nobody else
        uses. It is made while other threads may use the cache."""
        flat = flatten(state)
        with self._lock:
            host = self._host
            if self._room is not None and self._room[0].leaves == flat.leaves:
                return
            self._drop_room()
            if size > host.budget_bytes:
                self._room = Room(flat.leaves, flat.values), 0  # it is not kept: the next one takes its place
                return
            if 2 * size > host.budget_bytes or not self.has_room():
                return
            self._make_room(host, size, self._unexpected(host))
        room = flat.room()
        with self._lock:
            if self._room is None and host.fits(size):
                self._room = room, size
                host.nbytes += size

    def get(self, key: StateKey) -> object | None:
        """Return the cached state itself, or ``None``. It must not be modified: copy what you load from it."""
        with self._lock:
            held = self._find(key)
        if held is None:
            return None
        if held.wait is not None:
            held.wait()
        return held.state

    @property
    def nbytes(self) -> int:
        """Total bytes of all cached states, and of the memory prepared for the next one."""
        with self._lock:
            return self._host.nbytes + self._device.nbytes

    def __contains__(self, key: StateKey) -> bool:
        with self._lock:
            return key in self._host or key in self._device

    def __len__(self) -> int:
        with self._lock:
            return len(self._host) + len(self._device)

    # --- with the lock held -------------------------------------------------------------------------------

    def _tier_of(self, flat: FlatState) -> _Tier:
        return self._device if self._mover.is_on_device(flat) else self._host

    def _find(self, key: StateKey) -> _Held | None:
        """Return a cached state, and mark it as used."""
        for tier in (self._device, self._host):
            if key in tier:
                tier.move_to_end(key)
                return tier[key]
        return None

    def _keep(self, key: StateKey, flat: FlatState, size: int, tier: _Tier) -> object:
        if self._room is not None and self._room[0].leaves != flat.leaves:
            self._drop_room()
        # Make room before copying, so that evicted states and the copy are never in memory together.
        prepared = 0 if self._room is None or tier is self._device else size
        self._make_room(tier, size - prepared, [*self._unexpected(tier), *reversed(self._after(tier, None))])
        copy = self._copied(flat)
        tier.add(key, _Held(copy, size))
        return copy

    def _hold_on_host(
        self, key: StateKey, size: int, made: Callable[[], tuple[object, Callable[[], object] | None]]
    ) -> None:
        """Keep a state in host memory unless those needed sooner leave no room for it."""
        host = self._host
        order = [*self._unexpected(host), *reversed(self._after(host, key))]
        if host.fits(size - sum(host[other].nbytes for other in order)):
            self._make_room(host, size, order)
            state, wait = made()
            host.add(key, _Held(state, size, wait))

    def _copied(self, flat: FlatState) -> object:
        room = self._room
        if room is None or room[0].leaves != flat.leaves or self._mover.is_on_device(flat):
            return flat.copied()
        self._drop_room()
        return flat.copied(room[0])

    def _drop_room(self) -> None:
        if self._room is not None:
            self._host.nbytes -= self._room[1]
            self._room = None

    def _make_room(self, tier: _Tier, size: int, order: Iterable[StateKey]) -> None:
        """Evict states in this order until ``size`` more bytes fit, or none is left."""
        for key in order:
            if tier.fits(size):
                return
            held = tier.remove(key)
            if tier is self._device:
                flat = flatten(held.state)
                self._hold_on_host(key, held.nbytes, lambda flat=flat: self._mover.to_host(flat))  # type: ignore[misc]

    def _unexpected(self, tier: _Tier) -> list[StateKey]:
        """Return the states that are not expected to be needed, the least recently used first."""
        return [key for key in tier if key not in self._expected]

    def _after(self, tier: _Tier, key: StateKey | None) -> list[StateKey]:
        """Return the states that are expected to be needed later than one, soonest first; all if it is ``None``, and
        none if it is not expected."""
        kept = [other for other in self._expected if other in tier or other == key]
        if key is None:
            return kept
        return kept[kept.index(key) + 1 :] if key in kept else []
