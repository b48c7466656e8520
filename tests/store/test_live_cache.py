"""The live cache keeps copies within its budget and lets the least recently used go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hpstage.checkpoints import LiveCache, leaves
from hpstage.checkpoints.host_memory import HostMemory
from hpstage.checkpoints.lazy_copies import is_lazy
from hpstage.checkpoints.state_tree import FlatState, clone, digest, flatten, nbytes, unflatten
from hpstage.plan.facts import StateKey

A, B, C, D = (StateKey(letter * 32) for letter in "abcd")


def state(value: float, length: int = 1000) -> dict[str, np.ndarray]:
    return {"w": np.full(length, value)}


SIZE = nbytes(state(0))


def test_a_cached_state_does_not_change_with_the_live_state() -> None:
    cache, live = LiveCache(), state(1)
    cache.put(A, live)
    live["w"] += 1
    kept = cache.get(A)
    assert isinstance(kept, dict)
    assert kept["w"][0] == 1
    assert cache.get(A) is kept
    assert cache.get(B) is None


def test_a_fork_of_a_cached_state_copies_only_the_tensors_that_it_changes() -> None:
    cache, live = LiveCache(), {"w": torch.ones(10_000), "v": torch.ones(10_000)}
    cache.put(A, live)
    kept = cache.get(A)
    fork: Any = clone(kept)
    assert all(map(is_lazy, fork.values()))
    fork["w"] += 1
    live["v"] += 1
    assert not is_lazy(fork["w"]) and is_lazy(fork["v"])
    assert digest(kept) == digest({"w": torch.ones(10_000), "v": torch.ones(10_000)})
    fork["v"] += 1
    assert fork["v"].unique().item() == 2.0


def test_the_least_recently_used_state_is_evicted_first() -> None:
    cache = LiveCache(3 * SIZE)
    for key in (A, B, C):
        cache.put(key, state(1))
    cache.get(A)
    cache.put(D, state(1))
    assert [key in cache for key in (A, B, C, D)] == [True, False, True, True]
    cache.put(C, state(1))
    cache.put(B, state(1))
    assert [key in cache for key in (A, B, C, D)] == [False, True, True, True]


def test_the_live_cache_counts_its_bytes_exactly_and_stays_within_its_budget() -> None:
    cache = LiveCache(3 * SIZE)
    for number in range(20):
        cache.put(StateKey(f"{number:032x}"), state(number, 100 * (number % 7)))
        assert cache.nbytes <= 3 * SIZE
        kept = [cache.get(StateKey(f"{other:032x}")) for other in range(20)]
        assert cache.nbytes == sum(nbytes(each) for each in kept if each is not None)


@pytest.mark.parametrize("budget", [10**6, 1000], ids=["all", "1,000"])
@pytest.mark.parametrize("put", [LiveCache.put, LiveCache.adopt])
def test_the_cost_of_caching_a_state_does_not_grow_with_the_number_of_cached_states(
    budget: int, put: Callable[[LiveCache, StateKey, object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = 0

    class Expected(dict[StateKey, None]):
        def __contains__(self, key: object) -> bool:
            nonlocal looked_at
            looked_at += 1
            return super().__contains__(key)

    cache = LiveCache(budget * nbytes(state(0, 1)))
    monkeypatch.setattr(cache, "_expected", Expected())
    for number in range(3000):
        put(cache, StateKey(f"{number:032x}"), state(number, 1))
    assert looked_at <= 2 * 3000
    assert len(cache) == min(budget, 3000)


def test_a_state_larger_than_the_budget_is_not_cached_and_evicts_nothing() -> None:
    cache = LiveCache(2 * SIZE)
    cache.put(A, state(1))
    cache.put(B, state(1, 3000))
    assert B not in cache
    assert A in cache


def test_a_state_that_is_cached_twice_is_counted_once() -> None:
    cache = LiveCache()
    cache.put(A, state(1))
    cache.put(A, state(1))
    assert cache.nbytes == SIZE


# --- what is needed next ----------------------------------------------------------------------------------


def test_unneeded_states_are_evicted_first_and_then_the_state_needed_last() -> None:
    cache = LiveCache(3 * SIZE)
    for number, key in enumerate((A, B, C), 1):
        cache.put(key, state(number))
    cache.expect([C, A])
    cache.put(D, state(4))
    assert kept(cache) == [1, 3, 4], "B, though A is older"
    cache.expect([C, A, D])
    cache.put(B, state(2))
    assert kept(cache) == [1, 2, 3], "D is needed after the others"


def test_a_fetched_state_evicts_only_states_that_are_unneeded_or_needed_later() -> None:
    cache = LiveCache(2 * SIZE)
    cache.put(A, state(1))
    cache.put(B, state(2))
    cache.expect([C, B])
    cache.adopt(C, state(3))
    assert kept(cache) == [2, 3]
    cache.expect([C, D, B])
    cache.adopt(D, state(4))
    assert kept(cache) == [3, 4]
    cache.adopt(B, state(2))
    cache.adopt(A, state(1, 3000))
    assert kept(cache) == [3, 4], "there is no room for what is needed last, or is too large"
    assert cache.nbytes == 2 * SIZE


def test_memory_prepared_for_the_next_copy_evicts_no_needed_state() -> None:
    cache = LiveCache(2 * SIZE)
    cache.put(A, state(1))
    cache.put(B, state(2))
    cache.expect([A, B])
    cache.prepare(state(3), SIZE)
    assert (kept(cache), cache.nbytes) == ([1, 2], 2 * SIZE)


# --- memory for the next copy -----------------------------------------------------------------------------


def flat(value: float, length: int = 1000) -> FlatState:
    return flatten(state(value, length))


def kept(cache: LiveCache) -> list[float]:
    return [found["w"][0] for found in map(cache.get, (A, B, C, D)) if isinstance(found, dict)]


def test_a_copy_in_prepared_memory_is_independent_of_other_copies() -> None:
    cache = LiveCache(4 * SIZE)
    first, _ = cache.copy(A, flat(1), SIZE)
    cache.prepare(first, SIZE)
    assert cache.nbytes == 2 * SIZE
    live = state(2)
    second, _ = cache.copy(B, flatten(live), SIZE)
    live["w"] += 1
    third, _ = cache.copy(C, flat(3), SIZE)
    assert cache.nbytes == 3 * SIZE, "the memory is used once"
    assert kept(cache) == [1, 2, 3]
    assert [cache.get(key) for key in (A, B, C)] == [first, second, third]


def test_memory_prepared_for_the_next_copy_counts_in_the_budget_and_is_freed_for_states() -> None:
    cache = LiveCache(3 * SIZE)
    for number, key in enumerate((A, B, C)):
        cache.put(key, state(number))
    cache.prepare(state(3), SIZE)
    assert (kept(cache), cache.nbytes) == ([1, 2], 3 * SIZE), "the least recently used made way"
    cache.copy(D, flat(4, 1500), nbytes(state(4, 1500)))
    assert kept(cache) == [2, 4], "what does not fit is not used"
    assert cache.nbytes == SIZE + nbytes(state(4, 1500))


def test_a_state_too_large_for_the_cache_reuses_the_memory_of_the_previous_copy() -> None:
    cache = LiveCache(SIZE - 1)
    first, _ = cache.copy(A, flat(1), SIZE)
    cache.prepare(first, SIZE)
    second, _ = cache.copy(B, flat(2), SIZE)
    assert isinstance(first, dict) and isinstance(second, dict)
    assert second["w"] is first["w"]
    assert (len(cache), cache.nbytes) == (0, 0)


def test_copying_under_a_cached_key_copies_the_given_state_and_keeps_the_cached_one() -> None:
    cache = LiveCache()
    cache.put(A, state(1))
    copy, _ = cache.copy(A, flat(2), SIZE)
    assert isinstance(copy, dict)
    assert copy["w"][0] == 2
    assert kept(cache) == [1]


LEAVES = {
    "numpy": np.arange(12.0).reshape(3, 4),
    "column-major": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "none": np.zeros((0, 3)),
    "scalar": np.float32(3.0),
    "zero-dimensional": np.array(7),
    "bytes": b"abc",
    "tensor": torch.arange(12.0).reshape(3, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "channels last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "slice": torch.arange(12)[::2],
    "transposed slice": torch.arange(24.0).reshape(4, 6)[:, ::2].t(),
    "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 4),
    "one row": torch.arange(4.0).reshape(4, 1).t(),
    "array slice": np.arange(24.0).reshape(4, 6)[:, ::2].T,
    "empty": torch.zeros(0, 2),
    "zero": torch.tensor(4.0),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "float8": torch.ones(5).to(torch.float8_e4m3fn),
    "scales": torch.ones(5).to(torch.float8_e8m0fnu),
    "bfloat16": torch.ones(5, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_of_a_state_copied_into_prepared_memory_equals_a_copy_in_new_memory(name: str) -> None:
    given = flatten({"leaf": LEAVES[name]})
    plain, prepared = given.copy().state(), given.copy(given.room()).state()
    assert digest(prepared) == digest(plain) == digest({"leaf": LEAVES[name]})
    assert flatten(prepared).leaves == flatten(plain).leaves
    assert isinstance(prepared, dict) and type(prepared["leaf"]) is type(plain["leaf"])
    if isinstance(prepared["leaf"], torch.Tensor):
        assert not prepared["leaf"].requires_grad
        assert prepared["leaf"].untyped_storage().nbytes() == plain["leaf"].untyped_storage().nbytes()


# --- what states have in common ------------------------------------------------------------------------------


FROZEN = torch.arange(50_000.0)


def tuned(value: float) -> dict[str, torch.Tensor]:
    """Made again each time, as if a model's parameters."""
    return {"frozen": FROZEN.clone(), "tuned": torch.full((5_000,), value), "step": torch.tensor(value)}


def found_in(cache: LiveCache, key: StateKey) -> dict[str, torch.Tensor]:
    found = cache.get(key)
    assert isinstance(found, dict)
    return found


OWN = nbytes(tuned(0)) - FROZEN.nbytes


def test_cached_states_share_unchanged_tensors_whose_bytes_count_once() -> None:
    cache = LiveCache()
    for number, key in enumerate((A, B, C)):
        cache.put(key, tuned(number))
    assert len({found_in(cache, key)["frozen"].data_ptr() for key in (A, B, C)}) == 1
    assert [found_in(cache, key)["tuned"][0].item() for key in (A, B, C)] == [0, 1, 2]
    assert cache.nbytes == 3 * OWN + FROZEN.nbytes


def test_shared_tensors_count_once_in_the_budget_and_are_freed_with_their_last_state() -> None:
    cache = LiveCache(FROZEN.nbytes + 2 * OWN)
    for number, key in enumerate((A, B, C)):
        cache.put(key, tuned(number))
    assert [key in cache for key in (A, B, C)] == [False, True, True]
    assert cache.nbytes == FROZEN.nbytes + 2 * OWN
    cache.put(D, {"other": torch.zeros(50_000)})
    assert cache.nbytes == nbytes({"other": torch.zeros(50_000)}) and len(cache) == 1


@pytest.mark.parametrize(
    "write", [lambda t: t.data.add_(1), lambda t: t.numpy().fill(1), lambda t: t.view(-1)[:1].fill_(9)]
)
def test_a_write_that_leaves_the_tensor_version_counter_unchanged_is_detected(
    write: Callable[[torch.Tensor], object],
) -> None:
    cache, live = LiveCache(), tuned(0)
    cache.put(A, live)
    write(live["frozen"])
    cache.put(B, live)
    assert torch.equal(found_in(cache, A)["frozen"], FROZEN)
    assert torch.equal(found_in(cache, B)["frozen"], live["frozen"])


def test_cached_states_share_tensors_only_if_their_bits_are_equal() -> None:
    cache = LiveCache()
    nan = torch.full((5_000,), float("nan"))
    cache.put(A, {"x": nan, "zero": torch.zeros(5_000)})
    cache.put(B, {"x": nan.clone(), "zero": -torch.zeros(5_000)})
    assert found_in(cache, A)["x"] is found_in(cache, B)["x"]
    assert found_in(cache, B)["zero"].signbit().all() and not found_in(cache, A)["zero"].signbit().any()


def test_a_loaded_state_shares_unchanged_tensors_with_cached_states() -> None:
    cache, loaded = LiveCache(), tuned(1)
    cache.put(A, tuned(0))
    cache.adopt(B, loaded)
    cache.put(C, tuned(2))
    assert found_in(cache, B)["tuned"] is loaded["tuned"]
    assert len({found_in(cache, key)["frozen"].data_ptr() for key in (A, B, C)}) == 1


def test_memory_for_the_next_copy_is_prepared_only_for_tensors_that_change() -> None:
    cache = LiveCache()
    cache.put(A, tuned(0))
    flat = flatten(tuned(1))
    copy, _ = cache.copy(B, flat, flat.nbytes)
    cache.prepare(copy, flat.nbytes)
    assert cache.nbytes == FROZEN.nbytes + 3 * OWN
    cache.put(C, tuned(2))
    assert cache.nbytes == FROZEN.nbytes + 3 * OWN
    assert [found_in(cache, key)["tuned"][0].item() for key in (A, B, C)] == [0, 1, 2]


def test_tensors_shared_by_cached_states_are_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    content = leaves.content
    monkeypatch.setattr(leaves, "content", lambda leaf, value: (hashed.append(leaf.name), content(leaf, value))[1])
    cache = LiveCache()
    digests = []
    for number, key in enumerate((A, B, C)):
        cache.put(key, tuned(number))
        digests.append([*map(leaves.hash_of, flatten(tuned(number)).leaves, flatten(cache.get(key)).values)])
    assert hashed.count("tuned") == 3 and hashed.count("frozen") == 2, "the first did not yet share it"
    assert digests == [[*map(leaves.hash_of, flatten(tuned(n)).leaves, flatten(tuned(n)).values)] for n in range(3)]


def test_memory_reused_for_the_next_copy_belongs_to_no_cached_state() -> None:
    cache = LiveCache(nbytes(tuned(0)))
    cache.put(A, tuned(0))
    big = {**tuned(1), "more": torch.zeros(50_000)}
    copies = []
    for number in range(3):
        big["frozen"] = FROZEN + number
        flat = flatten(big)
        copy, _ = cache.copy(StateKey(f"{number:032x}"), flat, flat.nbytes)
        assert isinstance(copy, dict) and torch.equal(copy["frozen"], FROZEN + number)
        cache.prepare(copy, flat.nbytes)
        copies.append(copy)
    assert torch.equal(found_in(cache, A)["frozen"], FROZEN)
    assert copies[2]["frozen"] is copies[0]["frozen"], "of one that is not kept"


def test_tensors_on_a_device_are_shared_after_a_comparison_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for the device."""
    monkeypatch.setattr(torch, "equal", lambda one, two: (one == two).all())
    cache = LiveCache()
    cache.put(A, tuned(0))
    cache.put(B, tuned(1))
    assert found_in(cache, A)["frozen"] is found_in(cache, B)["frozen"]
    assert found_in(cache, A)["tuned"] is not found_in(cache, B)["tuned"]


# --- tiers ------------------------------------------------------------------------------------------------


class Stands:
    """The CPU stands for the device: tensors of 64-bit floats are there. Copies are complete once waited for."""

    def __init__(self) -> None:
        self.moved = self.waited = 0
        self.free = 1 << 40

    def is_on_device(self, flat: FlatState) -> bool:
        return any(isinstance(value, torch.Tensor) and value.dtype == torch.float64 for value in flat.values)

    def room(self, flat: FlatState) -> int:
        return self.free

    def to_host(self, flat: FlatState) -> tuple[object, Callable[[], object]]:
        self.moved += 1
        source, copy = flat.copy().state(), flat.room()

        def wait() -> None:
            self.waited += 1
            for value, into in zip(flatten(source).values, copy.values, strict=True):
                into.copy_(value)

        return unflatten(flat.tree, copy.values), wait


def on_device(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value, dtype=torch.float64)}


LARGE = nbytes(on_device(0))


def values(cache: LiveCache) -> list[float]:
    return [float(found["w"][0]) for found in map(cache.get, (A, B, C, D)) if isinstance(found, dict)]


def test_evicted_states_move_from_device_to_host_and_are_then_dropped() -> None:
    mover = Stands()
    cache = LiveCache(LARGE, 2 * LARGE, mover=mover)
    for number, key in enumerate((A, B), 1):
        cache.put(key, on_device(number))
    assert (mover.moved, cache.nbytes) == (0, 2 * LARGE)
    cache.put(C, on_device(3))
    assert (values(cache), mover.moved, cache.nbytes) == ([1, 2, 3], 1, 3 * LARGE)
    cache.put(D, on_device(4))
    assert (values(cache), mover.moved, cache.nbytes) == ([2, 3, 4], 2, 3 * LARGE)


def test_the_state_needed_next_is_evicted_last_from_device_and_host() -> None:
    cache = LiveCache(LARGE, LARGE, mover=Stands())
    cache.put(A, on_device(1))
    cache.expect([A])
    cache.put(B, on_device(2))
    cache.put(C, on_device(3))
    assert values(cache) == [1, 3], "B did not take its place on the host"


def test_a_state_on_the_host_takes_no_room_from_states_on_the_device() -> None:
    cache = LiveCache(2 * LARGE, LARGE, mover=Stands())
    cache.put(A, on_device(1))
    for number, key in enumerate((B, C, D), 2):
        cache.put(key, {"w": torch.full((2000,), float(number))})
    assert values(cache) == [1, 3, 4]


def test_a_device_state_copied_for_writing_is_complete_on_the_host_after_the_wait() -> None:
    mover = Stands()
    cache = LiveCache(LARGE, LARGE, mover=mover)
    live = on_device(1)
    copy, wait = cache.copy(A, flatten(live), LARGE)
    live["w"] += 1
    assert wait is not None
    wait()
    assert isinstance(copy, dict)
    assert float(copy["w"][0]) == 1.0
    assert A in cache and values(cache) == [1]


def test_states_are_cached_on_a_device_only_in_memory_that_training_leaves_free() -> None:
    mover = Stands()
    cache = LiveCache(2 * LARGE, 8 * LARGE, mover=mover)
    cache.put(A, on_device(1))
    mover.free = LARGE
    cache.put(B, on_device(2))
    assert mover.moved == 0
    mover.free = 0
    cache.put(C, on_device(3))
    assert (values(cache), mover.moved) == ([1, 2, 3], 1), "the first has left the device"
    mover.free = -2 * LARGE
    waited = mover.waited
    copy, wait = cache.copy(D, flatten(on_device(4)), LARGE)
    assert (wait, mover.waited - waited) == (None, 1), "training has waited, so that it may write to the state"
    assert D not in cache and isinstance(copy, dict) and copy["w"][0] == 4


def test_no_state_is_cached_on_a_device_that_has_run_out_of_memory() -> None:
    mover = Stands()
    cache = LiveCache(4 * LARGE, 4 * LARGE, mover=mover)
    cache.put(A, on_device(1))
    assert cache.leave_devices() and not cache.leave_devices()
    cache.put(B, on_device(2))
    assert (values(cache), mover.moved) == ([1], 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_states_are_copied_to_pinned_memory_with_their_values_at_the_time_of_the_copy() -> None:
    """Of the values that they had when they were copied."""
    cache = LiveCache(1 << 30, 3 << 20)
    tensor = torch.zeros(1 << 18, device="cuda")
    keys = [StateKey(f"{number:032x}") for number in range(8)]
    copies = []
    for number, key in enumerate(keys):
        tensor.fill_(number)
        flat = flatten({"w": tensor})
        copies.append(cache.copy(key, flat, flat.nbytes))
        tensor.fill_(-1)
    for number, (key, (copy, wait)) in enumerate(zip(keys, copies, strict=True)):
        assert wait is not None
        wait()
        found = cache.get(key)
        assert isinstance(copy, dict) and isinstance(found, dict)
        assert copy["w"].is_pinned() and copy["w"].unique().tolist() == [number]
        assert found["w"].unique().tolist() == [number]
        assert found["w"].is_cuda == (number >= 6)


class Memory(HostMemory):
    room = True

    def has_room(self, size: int) -> bool:
        return self.room


def test_the_live_cache_evicts_states_and_takes_no_new_ones_when_host_memory_is_scarce() -> None:
    memory = Memory(1)
    cache = LiveCache(memory=memory)
    cache.put(A, state(1))
    cache.expect([A])
    cache.relieve()
    assert A in cache
    memory.room = False
    cache.put(B, state(1))
    cache.adopt(C, state(1))
    assert [key in cache for key in (A, B, C)] == [True, False, False]
    cache.relieve()
    assert len(cache) == 0 and cache.nbytes == 0
    memory.room = True
    cache.put(B, state(1))
    assert B in cache


def test_memory_reserved_for_a_state_counts_towards_the_cache_budget() -> None:
    for states, room in ((1.5, False), (2.5, True)):
        cache = LiveCache(int(states * SIZE))
        cache.put(A, state(0))
        assert cache.holds_two() == room
        cache.reserve(SIZE)
        assert cache.has_room() == room
        cache.put(B, state(1))
        assert kept(cache) == ([0.0, 1.0] if room else [0.0])
        cache.make_way()  # for one that is loaded
        assert kept(cache) == ([0.0, 1.0] if room else [])
        cache.reserve(0)
        assert cache.has_room()
