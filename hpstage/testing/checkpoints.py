"""CheckpointContract: the obligations of every implementation of the CheckpointStore port."""

from __future__ import annotations

import math
import multiprocessing
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.pool import Pool, ThreadPool
from typing import ClassVar

import numpy as np
import pytest

from hpstage.checkpoints.stage_log import Series, StageLog
from hpstage.checkpoints.state_tree import digest, summary
from hpstage.checkpoints.store import CheckpointStore, Usage
from hpstage.errors import CheckpointCorrupt, CheckpointMissing, StateError
from hpstage.plan.facts import Kept, StateKey

KEY = StateKey("0" * 31 + "a")
OTHER = StateKey("f" * 31 + "b")


def example_state() -> dict[object, object]:
    """Return a state with every kind of value except torch's tensors."""
    return {
        "weights": {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.zeros(0, np.int8)},
        "scalar": np.float64(0.1),
        "flag": np.bool_(True),
        "random": random.Random(7).getstate(),
        "generator": np.random.Generator(np.random.Philox(3)).bit_generator.state,
        "history": [1, -1, 2**200, 0.1, -0.0, math.inf, None, True, "text\nwith \u00e9", b"\x00\xff", (), {}],
        0: {1: "int key", 2.5: "float key", None: "none", ("a", 1): "tuple"},
        "ordered": OrderedDict([("z", 1), ("a", (2, [3]))]),
    }


class CheckpointContract:
    """Subclass it, name the subclass ``Test...`` and override the fixture ``open_store``.

    ``class TestMyCheckpoints(CheckpointContract): ...``
    """

    processes: ClassVar[bool] = True
    """Whether other processes can access the same storage. If not, threads are used instead."""
    rounds: ClassVar[int] = 300
    """How many times a checkpoint is deleted and saved while another process reads it. Lower it for slow storage."""

    @pytest.fixture
    def open_store(self) -> Callable[[], CheckpointStore]:
        """A function that opens the store of this test, which is empty at first. It can be sent to another process."""
        raise NotImplementedError("override the fixture open_store")

    @pytest.fixture
    def store(self, open_store: Callable[[], CheckpointStore]) -> CheckpointStore:
        return open_store()

    def test_a_state_comes_back_with_types_shapes_values_and_order(self, store: CheckpointStore) -> None:
        state = example_state()
        store.save(KEY, state, step=3, parent=None)
        loaded = store.load(KEY)
        assert describe(loaded) == describe(state)
        assert digest(loaded) == digest(state)

    def test_tensors_of_torch_come_back_on_the_cpu_without_gradient(self, store: CheckpointStore) -> None:
        torch = pytest.importorskip("torch")
        weight = torch.nn.Parameter(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)))
        state = {
            "w": weight,
            "t": weight.t(),
            "none": torch.empty(0),
            "half": torch.ones((), dtype=torch.bfloat16),
        }
        store.save(KEY, state, step=0, parent=None)
        loaded = store.load(KEY)
        assert isinstance(loaded, dict)
        for name, tensor in state.items():
            assert type(loaded[name]) is torch.Tensor
            assert not loaded[name].requires_grad
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], tensor)

    def test_save_returns_what_is_kept_and_the_manifest_agrees(self, store: CheckpointStore) -> None:
        state = example_state()
        kept = store.save(KEY, state, step=3, parent=OTHER)
        manifest = store.manifest(KEY)
        assert kept == Kept(key=KEY, bytes=manifest.bytes, digest=digest(state), marks=summary(state)[1])
        assert (manifest.key, manifest.step, manifest.parent) == (KEY, 3, OTHER)
        assert manifest.digest == kept.digest
        assert manifest.bytes > 0

    def test_a_key_that_was_never_saved_is_missing(self, store: CheckpointStore) -> None:
        with pytest.raises(CheckpointMissing, match=KEY):
            store.load(KEY)
        with pytest.raises(CheckpointMissing, match=KEY):
            store.manifest(KEY)
        assert list(store.keys()) == []

    def test_verify_raises_what_load_would(self, store: CheckpointStore) -> None:
        with pytest.raises(CheckpointMissing, match=KEY):
            store.verify(KEY)
        store.save(KEY, example_state(), step=3, parent=None)
        store.verify(KEY)

    def test_the_identity_of_a_store_is_stable_and_proven_by_its_copies(
        self, open_store: Callable[[], CheckpointStore]
    ) -> None:
        store = open_store()
        store.prove()  # a location without a name proves nothing
        name = store.identity()
        assert name == open_store().identity() == store.identity()
        store.save(KEY, [1], step=0, parent=None)
        copy = pickle.loads(pickle.dumps(store))  # noqa: S301 - made in the line itself
        copy.prove()
        assert copy.identity() == name
        assert list(store.keys()) == [KEY]

    def test_keys_lists_what_is_kept(self, store: CheckpointStore) -> None:
        for key in (OTHER, KEY):
            store.save(key, {}, step=0, parent=None)
        assert sorted(store.keys()) == [KEY, OTHER]

    def test_a_deleted_checkpoint_is_missing_and_can_be_saved_again(self, store: CheckpointStore) -> None:
        store.save(KEY, [1], step=0, parent=None)
        store.delete(KEY)
        store.delete(KEY)
        assert list(store.keys()) == []
        with pytest.raises(CheckpointMissing):
            store.load(KEY)
        store.save(KEY, [1], step=0, parent=None)
        assert store.load(KEY) == [1]

    def test_saving_a_kept_key_again_changes_nothing(self, store: CheckpointStore) -> None:
        first = store.save(KEY, {"a": 1}, step=1, parent=None)
        assert store.save(KEY, {"a": 1}, step=1, parent=None) == first
        # Equal keys should mean equal training. If they do not, the saved state wins, and the planner is notified.
        other = store.save(KEY, {"a": 2}, step=1, parent=None)
        assert (other.key, other.bytes, other.digest) == (KEY, first.bytes, digest({"a": 2}))
        assert store.manifest(KEY).digest == first.digest
        assert store.load(KEY) == {"a": 1}

    def test_sizes_and_usage_are_of_what_is_kept(self, store: CheckpointStore) -> None:
        assert store.sizes() == {}
        assert store.usage() == Usage(checkpoints=0, bytes=0)
        small = store.save(KEY, {"a": 1}, step=1, parent=None)
        large = store.save(OTHER, [np.zeros(10_000)], step=1, parent=None)
        sizes = store.sizes()
        assert sizes.keys() == {KEY, OTHER}
        # The sizes in the storage include the manifests.
        for kept in (small, large):
            assert kept.bytes <= sizes[kept.key] < kept.bytes + 2000
        assert store.usage() == Usage(checkpoints=2, bytes=sum(sizes.values()))
        store.delete(OTHER)
        assert store.usage() == Usage(checkpoints=1, bytes=sizes[KEY])

    def test_a_log_outlives_its_checkpoint_and_does_not_count_as_a_checkpoint(self, store: CheckpointStore) -> None:
        log = StageLog(2, 3, {"loss": Series([2], [math.inf])}, "printed\n", 7)
        with pytest.raises(CheckpointMissing, match=KEY):
            store.load_log(KEY)
        store.save(KEY, [1], step=3, parent=None)
        store.save_log(KEY, log)
        assert store.load_log(KEY) == log
        assert set(store.logs()) == set(store.keys()) == {KEY}
        store.delete(KEY)
        assert (list(store.keys()), store.usage().bytes, store.sweep()) == ([], 0, 0)
        assert store.load_log(KEY) == log
        store.delete_log(KEY)
        store.delete_log(KEY)
        assert store.logs() == {}

    def test_a_log_that_is_saved_again_is_replaced(self, store: CheckpointStore) -> None:
        store.save_log(OTHER, StageLog(0, 1, output="first"))
        store.save_log(KEY, StageLog(0, 2, output="second"))
        store.save_log(KEY, StageLog(1, 2, output="third"))
        assert store.load_log(KEY) == StageLog(1, 2, output="third")
        assert store.load_log(OTHER) == StageLog(0, 1, output="first")
        assert store.logs().keys() == {KEY, OTHER}

    def test_sweep_and_check_change_no_checkpoint(self, store: CheckpointStore) -> None:
        store.check()
        assert list(store.keys()) == []
        store.save(KEY, {"a": 1}, step=1, parent=None)
        usage = store.usage()
        store.check()
        assert store.sweep() == 0
        assert store.load(KEY) == {"a": 1}
        assert store.usage() == usage

    def test_a_saved_state_does_not_change_with_the_live_one(self, store: CheckpointStore) -> None:
        array = np.zeros(3)
        store.save(KEY, [array], step=0, parent=None)
        array += 1
        assert digest(store.load(KEY)) == digest([np.zeros(3)])

    def test_loaded_states_are_writable_and_independent_of_each_other(self, store: CheckpointStore) -> None:
        store.save(KEY, {"a": np.zeros(3)}, step=0, parent=None)
        loaded = store.load(KEY)
        assert isinstance(loaded, dict)
        loaded["a"] += 1
        assert digest(store.load(KEY)) == digest({"a": np.zeros(3)})

    @pytest.mark.parametrize(
        ("state", "path"),
        [
            ({"scheduler": {"best": object()}}, r"state\['scheduler'\]\['best'\] is a object"),
            ([0, ({1, 2},)], r"state\[1\]\[0\] is a set"),
            ({"f": lambda: None}, r"state\['f'\] is a function"),
            ({"a": np.array([object()])}, r"state\['a'\] is an array of dtype object"),
        ],
    )
    def test_a_state_that_cannot_be_captured_is_refused_with_the_path_to_it(
        self, store: CheckpointStore, state: object, path: str
    ) -> None:
        with pytest.raises(StateError, match=path):
            store.save(KEY, state, step=0, parent=None)
        assert list(store.keys()) == []

    def test_a_store_can_be_pickled(self, store: CheckpointStore) -> None:
        store.save(KEY, {"a": 1}, step=0, parent=None)
        copy = pickle.loads(pickle.dumps(store))  # noqa: S301 - made in the line itself
        assert copy.load(KEY) == {"a": 1}

    def test_equal_tensors_of_several_states_may_be_stored_once(
        self, open_store: Callable[[], CheckpointStore]
    ) -> None:
        store = open_store()
        store.meet(_tuned(0))
        kept = [store.save(key, _tuned(number), step=number, parent=None) for number, key in enumerate((KEY, OTHER), 1)]
        assert list(store.keys()) == [KEY, OTHER] == list(store.sizes())
        for reader in (store, open_store()):
            loaded = [reader.load(key) for key in (KEY, OTHER)]
            assert [digest(one) for one in loaded] == [digest(_tuned(1)), digest(_tuned(2))]
            loaded[0]["frozen"] += 1  # type: ignore[index]  # loaded states share no memory
            assert digest(loaded[1]) == digest(reader.load(OTHER)) == digest(_tuned(2))
        parts = {part.key: part.bytes for one in kept for part in one.parts}
        sizes = store.parts()
        assert sizes.keys() == parts.keys()
        assert sum(store.sizes().values()) + sum(sizes.values()) == store.usage().bytes
        if not parts:
            return  # this store saves states as a whole
        assert kept[0].parts == kept[1].parts
        assert store.usage().bytes < 1.2 * _tuned(0)["frozen"].nbytes  # type: ignore[attr-defined]
        store.verify(KEY)
        for part in parts:
            store.delete(part)
        for use in (store.load, store.verify, open_store().load, open_store().verify):
            with pytest.raises(CheckpointCorrupt, match=KEY):
                use(KEY)
        store.delete(OTHER)
        assert digest(store.load(store.save(OTHER, _tuned(2), step=2, parent=None).key)) == digest(_tuned(2))
        assert digest(store.load(KEY)) == digest(_tuned(1))  # the part was written again
        whole = open_store().save(StateKey("1" * 32), _tuned(2), step=2, parent=None)
        assert not whole.parts and whole.bytes == kept[1].bytes  # the size does not depend on states met before

    def _pool(self, size: int) -> Pool:
        return multiprocessing.get_context("forkserver").Pool(size) if self.processes else ThreadPool(size)

    def test_processes_that_save_one_key_at_once_publish_it_once(
        self, open_store: Callable[[], CheckpointStore]
    ) -> None:
        with self._pool(2) as pool:
            results = pool.starmap(_save_many, [(open_store, 20)] * 2, 1)
            pool.close()
            pool.join()
        assert results[0] == results[1]
        store = open_store()
        assert sorted(store.keys()) == sorted(kept.key for kept in results[0])
        for kept in results[0]:
            assert digest(store.load(kept.key)) == kept.digest

    def test_a_reader_sees_a_whole_checkpoint_or_none_while_others_save_and_delete(
        self, open_store: Callable[[], CheckpointStore]
    ) -> None:
        store = open_store()
        expected = digest(_changing())
        seen: set[str | None] = set()
        with self._pool(1) as pool:
            writing = pool.apply_async(_save_and_delete, (open_store, self.rounds))
            while not writing.ready():
                try:
                    seen.add(digest(store.load(KEY)))
                except CheckpointMissing:
                    seen.add(None)
            writing.get()
            pool.close()
            pool.join()
        assert seen <= {expected, None}
        assert digest(store.load(KEY)) == expected


def _tuned(number: int) -> dict[str, object]:
    """Return a state of which only a small part depends on the number."""
    return {"frozen": np.arange(50_000.0), "scale": np.float64(3), "tuned": np.full(1_000, number), "step": number}


def _changing() -> list[object]:
    return [np.arange(10_000), "text"]


def _save_and_delete(open_store: Callable[[], CheckpointStore], count: int) -> None:
    store = open_store()
    store.save(KEY, _changing(), step=0, parent=None)
    for _ in range(count):
        store.delete(KEY)
        store.save(KEY, _changing(), step=0, parent=None)


def _save_many(open_store: Callable[[], CheckpointStore], count: int) -> list[Kept]:
    store = open_store()
    return [
        store.save(StateKey(f"{number:032x}"), [np.full(1000, number)], step=number, parent=None)
        for number in range(count)
    ]


def describe(state: object) -> object:
    """Return a representation of a state that ``==`` compares with types, bits and order."""
    if isinstance(state, dict):
        return type(state), [(describe(key), describe(value)) for key, value in state.items()]
    if isinstance(state, list | tuple):
        return type(state), [describe(item) for item in state]
    if isinstance(state, np.ndarray):
        return type(state), state.dtype.str, state.shape, state.tobytes()
    if isinstance(state, np.generic):
        return type(state), state.tobytes()
    if isinstance(state, float):
        return float, state.hex()
    return type(state), state
