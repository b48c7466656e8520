"""LiveCache: states that a worker keeps in memory, to fork them without reading their checkpoints."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from hpstage.checkpoints import lazy_copies
from hpstage.checkpoints.host_memory import HostMemory, give_back
from hpstage.checkpoints.leaves import Leaf, note_unmodified
from hpstage.checkpoints.on_device import CudaMover, is_out_of_memory
from hpstage.checkpoints.state_tree import NOTHING, FlatState, Room, flatten
from hpstage.errors import DeviceFull
from hpstage.plan.facts import StateKey

# Minimum bytes of a leaf that consecutive states share if it has not changed.
_SHARED = 1 << 14


class _Held(NamedTuple):
    state: object
    flat: FlatState
    nbytes: int
    wait: Callable[[], object] | None = None
    """Waits until the copy of the state is complete; ``None`` if it is complete already."""


class _Tier(OrderedDict[StateKey, _Held]):
    """States in one kind of memory, the least recently used first. Shared leaves count once. Not thread-safe."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes
        self.nbytes = 0
        self._held: Counter[int] = Counter()  # number of states that have a value, by its id

    def fits(self, size: int) -> bool:
        return self.nbytes + size <= self.budget_bytes

    def add(self, key: StateKey, held: _Held) -> None:
        self[key] = held
        self.nbytes += held.nbytes
        for leaf, value in _shareable(held.flat):
            self.nbytes -= leaf.nbytes if self._held[id(value)] else 0
            self._held[id(value)] += 1

    def remove(self, key: StateKey) -> _Held:
        held = self.pop(key)
        self.nbytes -= held.nbytes
        for leaf, value in _shareable(held.flat):
            self._held[id(value)] -= 1
            if self._held[id(value)]:
                self.nbytes += leaf.nbytes
            else:
                del self._held[id(value)]
        return held

    def leaving(self, order: Iterable[StateKey], size: int) -> tuple[list[StateKey], bool]:
        """Return the states to evict so that ``size`` more bytes fit: the first ones of ``order``, or all of them. Also
        return whether evicting them is enough."""
        leaving: list[StateKey] = []
        gone = Counter[int]()
        for key in order:
            if self.fits(size):
                break
            leaving.append(key)
            size -= self[key].nbytes
            for leaf, value in _shareable(self[key].flat):
                gone[id(value)] += 1
                size += leaf.nbytes if gone[id(value)] < self._held[id(value)] else 0
        return leaving, self.fits(size)


def _shareable(flat: FlatState) -> Iterator[tuple[Leaf, Any]]:
    """Yield the leaves that may be shared with other states. Byte strings are never copied."""
    for leaf, value in zip(flat.leaves, flat.values, strict=True):
        if leaf.nbytes >= _SHARED and leaf.kind != "bytes":
            yield leaf, value


class LiveCache:
    """A cache of states by key, in two tiers with a budget each. Thread-safe.

    Tensors stay on their device. A state with tensors on a device is in the device's tier, from which it moves to the
    host's tier when evicted. All other states are in the host's tier, from which they are dropped. States that are not
    expected to be needed are evicted first, the least recently used of them first; then the state that is needed last.

    If a leaf has the same bytes as in the last state, it is not copied again: both states share the tensor. The bytes
    are compared, since writes through ``.data``, NumPy or C++ do not change a tensor's version.

    Args:
        host_bytes: budget for states in host memory.
        device_bytes: budget for states on devices. Less is used if training needs the memory, and nothing once a device
            has run out of memory.
        mover: copies states from the device.
        memory: the host's memory. While it is scarce, no states are kept there.
    """

    def __init__(
        self,
        host_bytes: int = 2 << 30,
        device_bytes: int = 2 << 30,
        *,
        mover: CudaMover | None = None,
        memory: HostMemory | None = None,
    ) -> None:
        self._memory = memory
        self._size = 0  # of the last state
        self._elsewhere = 0  # bytes of states that this process holds outside the cache
        self._host = _Tier(host_bytes)
        self._device = _Tier(device_bytes)
        self._device_bytes = device_bytes
        self._mover = CudaMover() if mover is None else mover
        self._expected: dict[StateKey, None] = {}  # soonest first
        self._room: tuple[Room, int] | None = None  # for the next copy in host memory
        self._last: dict[str, tuple[Leaf, weakref.ref[Any]]] = {}  # the last copy's leaves, by name
        self._leaves: tuple[Leaf, ...] = ()  # all leaves of the last copy
        self._unchanged: set[int] = set()  # numbers of the leaves that the last copy shares with the copy before
        self._lock = threading.Lock()

    def put(self, key: StateKey, state: object) -> None:
        """Keep a deep copy of ``state``, unless it is larger than the budget.

        A key that is already there is only marked as used: equal keys mean equal states. Raises :class:`StateError`.
        """
        with self._lock:
            if self._find(key) is not None:
                return
            flat = flatten(state)
            size = self._size = flat.nbytes
            tier = self._tier_of(flat)
            if size <= tier.budget_bytes and (tier is self._device or self.has_room()):
                self._keep_if_possible(key, flat, size, tier)

    def has_room(self, size: int | None = None) -> bool:
        """Whether host memory has room for a copy of a state of ``size`` bytes; the default is the last size."""
        if size is not None:
            self._size = size
        if self._elsewhere and self._elsewhere + self._size > self._host.budget_bytes:
            return False
        return self._memory is None or self._memory.has_room(self._size)

    def reserve(self, nbytes: int) -> None:
        """Count bytes of another state that this process holds, such as one with which a fork is compared. If the
        budget cannot hold both that state and another one, there is no room for a copy."""
        self._elsewhere = nbytes

    def holds_two(self) -> bool:
        """Whether the budget can hold two states of the last size: a cached one, and one being loaded."""
        return 2 * self._size <= self._host.budget_bytes

    def make_way(self) -> None:
        """Drop the cached states if the budget cannot hold them together with a state that is about to be loaded."""
        if not self.holds_two():
            with self._lock:
                self._drop_room()
                self._make_room(self._host, self._host.budget_bytes, self._order(self._host))

    def relieve(self) -> None:
        """If host memory is scarce, drop the states in it and return freed memory to the system."""
        if not self.has_room():
            with self._lock:
                self._drop_room()
                self._make_room(self._host, self._host.budget_bytes, [*self._host])
            give_back()

    def copy(self, key: StateKey, flat: FlatState, size: int) -> tuple[object, Callable[[], object] | None]:
        """Return a deep copy of a state of ``size`` bytes in host memory, and a function that waits until the copy is
        complete. Also keep a copy if :meth:`put` would. The returned copy must not be modified."""
        with self._lock:
            tier = self._tier_of(flat)
            copy = None
            if self._find(key) is None and size <= tier.budget_bytes:
                copy = self._keep_if_possible(key, flat, size, tier)
            if tier is self._host:
                return (copy or self._copied(flat)).state(), None  # prepare() may give its memory to the next copy
            moved, wait = self._mover.to_host(copy or flat)
            if copy is None:
                wait()  # training, which writes to the state, has to wait: the device has no room for a copy
                return moved, None
            return moved, wait

    def leave_devices(self) -> bool:
        """Stop keeping states on devices, since a device has run out of memory. Return whether there were any."""
        with self._lock:
            held = bool(self._device)
            self._leave_devices()
            return held

    def makes_room(self, error: Exception) -> bool:
        """If a device has run out of memory, drop the states on devices. Return whether a retry may succeed."""
        if isinstance(error, DeviceFull):
            self.leave_devices()
            return True
        return is_out_of_memory(error) and self.leave_devices()

    def expect(self, keys: Sequence[StateKey]) -> None:
        """Set which states will be needed, soonest first."""
        with self._lock:
            self._expected = dict.fromkeys(keys)

    def adopt(self, key: StateKey, state: object) -> None:
        """Keep a state in host memory without copying it, unless states that are needed sooner leave no room. Nobody
        else may use the state. It shares leaves that are the same as in the last state."""
        with self._lock:
            if self._find(key) is None and self.has_room():
                flat = flatten(state)
                known = self._same(flat)
                values = (known.get(index, value) for index, value in enumerate(flat.values))
                flat = FlatState(flat.tree, flat.leaves, tuple(values))
                self._hold_on_host(key, flat.nbytes, lambda: (flat.state(), None))
                self._remember(flat, known)

    def prepare(self, state: object, size: int) -> None:
        """Allocate memory for the copy of another state like this one, while other threads may use the cache. The state
        must have been returned by :meth:`copy`, and nobody else may use it."""
        flat = flatten(state)
        with self._lock:
            host = self._host
            if self._room is not None and self._room[0].leaves == flat.leaves:
                return
            self._drop_room()
            if size > host.budget_bytes:
                self._room = Room(flat.leaves, flat.values), 0  # this state is not kept: the next copy reuses it
                return
            known = self._unchanged if self._leaves == flat.leaves else set()
            size -= sum(flat.leaves[index].nbytes for index in known)
            if 2 * size > host.budget_bytes or not self.has_room():
                return
            self._make_room(host, size, self._unexpected(host))
        room = flat.room(known)
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
        if not self._mover.is_on_device(flat):
            return self._host
        self._device.budget_bytes = min(self._device_bytes, self._device.nbytes + self._mover.room(flat))
        return self._device

    def _find(self, key: StateKey) -> _Held | None:
        """Return a cached state, and mark it as used."""
        for tier in (self._device, self._host):
            if key in tier:
                tier.move_to_end(key)
                return tier[key]
        return None

    def _same(self, flat: FlatState) -> dict[int, Any]:
        """Return, by number of the leaf, the values of the last copy that have the same bytes as in another state."""
        last = ((name, leaf, value()) for name, (leaf, value) in self._last.items())
        return flat.same_in({name: (leaf, value) for name, leaf, value in last if value is not None})

    def _remember(self, flat: FlatState, known: Container[int]) -> None:
        self._last = {leaf.name: (leaf, weakref.ref(value)) for leaf, value in _shareable(flat)}
        self._leaves = flat.leaves
        self._unchanged = {index for index in range(len(flat.leaves)) if index in known}
        for index in self._unchanged:
            note_unmodified(flat.values[index])

    def _keep_if_possible(self, key: StateKey, flat: FlatState, size: int, tier: _Tier) -> FlatState | None:
        """Keep a copy and return it; return ``None`` if the device has no memory for it."""
        try:
            return self._keep(key, flat, size, tier)
        except RuntimeError as error:
            if tier is self._host or not is_out_of_memory(error):
                raise
        self._leave_devices()
        return None

    def _leave_devices(self) -> None:
        self._device_bytes = self._device.budget_bytes = 0
        self._make_room(self._device, 0, self._order(self._device))

    def _keep(self, key: StateKey, flat: FlatState, size: int, tier: _Tier) -> FlatState:
        if self._room is not None and self._room[0].leaves != flat.leaves:
            self._drop_room()
        known = self._same(flat)
        # Make room before copying, so that evicted states and the copy are never in memory together.
        own = size - sum(flat.leaves[index].nbytes for index in known)
        prepared = 0 if self._room is None or tier is self._device else self._room[1]
        needed = max(0, own - prepared)
        self._make_room(tier, needed, self._order(tier))
        copy = self._copied(flat, known)
        for value in copy.values:
            lazy_copies.allow_copies(value)  # a fork takes no memory for tensors that it only reads
        self._remember(copy, known)
        tier.add(key, _Held(copy.state(), copy, size))
        return copy

    def _hold_on_host(
        self, key: StateKey, size: int, made: Callable[[], tuple[object, Callable[[], object] | None]]
    ) -> None:
        """Keep a state in host memory, unless states that are needed sooner leave no room for it."""
        host = self._host
        leaving, fits = host.leaving(chain(self._unexpected(host), reversed(self._after(host, key))), size)
        if fits:
            for other in leaving:
                host.remove(other)
            state, wait = made()
            host.add(key, _Held(state, flatten(state), size, wait))

    def _copied(self, flat: FlatState, known: Mapping[int, Any] = NOTHING) -> FlatState:
        room = self._room
        if room is None or room[0].leaves != flat.leaves or self._mover.is_on_device(flat):
            return flat.copy(known=known)
        self._drop_room()
        return flat.copy(room[0], known)

    def _drop_room(self) -> None:
        if self._room is not None:
            self._host.nbytes -= self._room[1]
            self._room = None

    def _make_room(self, tier: _Tier, size: int, order: Iterable[StateKey]) -> None:
        """Evict states in this order until ``size`` more bytes fit, or none is left."""
        for key in tier.leaving(order, size)[0]:
            held = tier.remove(key)
            if tier is self._device:
                self._hold_on_host(key, held.nbytes, lambda flat=held.flat: self._mover.to_host(flat))  # type: ignore[misc]

    def _order(self, tier: _Tier) -> Iterator[StateKey]:
        """Yield all states in the order in which they are evicted."""
        yield from self._unexpected(tier)
        yield from reversed(self._after(tier, None))

    def _unexpected(self, tier: _Tier) -> Iterator[StateKey]:
        """Yield the states that are not expected to be needed, the least recently used first."""
        return (key for key in tier if key not in self._expected)

    def _after(self, tier: _Tier, key: StateKey | None) -> list[StateKey]:
        """Return the states that are expected to be needed later than ``key``, soonest first: all if ``key`` is
        ``None``, none if ``key`` is not expected."""
        kept = [other for other in self._expected if other in tier or other == key]
        if key is None:
            return kept
        return kept[kept.index(key) + 1 :] if key in kept else []
