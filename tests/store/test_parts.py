"""States that have leaves in common, saved by several processes, deleted and damaged in any order."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hpstage.checkpoints import FolderCheckpoints, lazy_copies
from hpstage.checkpoints.sharing import Sharing
from hpstage.checkpoints.state_tree import digest, flatten
from hpstage.errors import CheckpointCorrupt
from hpstage.plan.facts import Kept, StateKey

LARGE = [np.random.default_rng(number).random(9_000) for number in range(3)]
KEYS = [StateKey(f"{number:032x}") for number in range(12)]


def state_of(key: StateKey) -> dict[str, object]:
    """Equal keys have equal states; many have a leaf in common, some two, or the same leaf twice."""
    number = int(key, 16)
    return {"a": LARGE[number % 3], "b": LARGE[number // 3 % 3], "own": np.full(100, number), "step": number}


class Stores(RuleBasedStateMachine):
    """What :class:`FolderCheckpoints` do with parts, against a dict that keeps everything."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.stores = [FolderCheckpoints(self.path, "w") for _ in range(2)]
        self.kept: dict[StateKey, Kept] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.path)

    @rule(store=st.integers(0, 1), key=st.sampled_from(KEYS))
    def save(self, store: int, key: StateKey) -> None:
        kept = self.stores[store].save(key, state_of(key), step=0, parent=None)
        assert (kept.key, kept.digest) == (key, digest(state_of(key)))
        assert len({kept.bytes, self.kept.get(key, kept).bytes}) == 1
        self.kept[key] = kept

    @rule(store=st.integers(0, 1), key=st.sampled_from(KEYS))
    def meet(self, store: int, key: StateKey) -> None:
        self.stores[store].meet(state_of(key))

    @rule(store=st.integers(0, 1))
    def restart(self, store: int) -> None:
        self.stores[store] = FolderCheckpoints(self.path, "w")

    @precondition(lambda self: self.kept)
    @rule(store=st.integers(0, 1), data=st.data())
    def delete(self, store: int, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.kept)))
        self.stores[store].delete(key)
        del self.kept[key]

    @rule(store=st.integers(0, 1))
    def collect(self, store: int) -> None:
        for part in self.stores[store].parts().keys() - self.named():
            self.stores[store].delete(part)

    @precondition(lambda self: self.named())
    @rule(data=st.data(), how=st.sampled_from(["gone", "flipped", "forged"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        part = data.draw(st.sampled_from(sorted(self.named())))
        (file,) = self.path.glob(f"pa/{part}/state.safetensors")
        if how == "gone":
            shutil.rmtree(file.parent)
        elif how == "forged":
            held = data.draw(st.sampled_from([{}, {"x": LARGE[0]}, dict.fromkeys(self.names(part), LARGE[0] + 1)]))
            shutil.rmtree(file.parent)
            FolderCheckpoints(self.path, "w").save(part, held, step=0, parent=None)
        else:
            content = bytearray(file.read_bytes())
            content[data.draw(st.integers(0, len(content) - 1))] ^= 4
            file.write_bytes(content)
        lost = [key for key, kept in self.kept.items() if part in {one.key for one in kept.parts}]
        for key in lost:
            for store in self.stores:
                for read in (store.load, store.verify):
                    with pytest.raises(CheckpointCorrupt, match=key):
                        read(key)
        for key in lost:  # trained again
            self.save(data.draw(st.integers(0, 1)), key)

    def names(self, part: StateKey) -> list[str]:
        described = json.loads((self.path / "pa" / part / "state.json").read_bytes())
        return [leaf["name"] for leaf in described["leaves"]]

    def named(self) -> set[StateKey]:
        return {part.key for kept in self.kept.values() for part in kept.parts}

    @invariant()
    def all_is_there(self) -> None:
        for number, key in enumerate(self.kept):
            store = self.stores[number % 2]
            assert digest(store.load(key)) == digest(state_of(key))
            assert store.manifest(key).as_kept() == self.kept[key]
        assert self.stores[0].sizes().keys() == self.kept.keys()
        assert self.named() <= self.stores[1].parts().keys()


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_tensors_that_most_states_share_are_stored_once(tmp_path: Path) -> None:
    stores = [FolderCheckpoints(tmp_path, "w") for _ in range(3)]
    for store in stores:
        store.meet({"frozen": LARGE[0], "trained": LARGE[1]})
    for number in range(1, 31):
        state = {"frozen": LARGE[0], "trained": LARGE[1] + number, "step": number}
        stores[number % 3].save(StateKey(f"{number:032x}"), state, step=number, parent=None)
    [size] = stores[0].parts().values()
    assert LARGE[0].nbytes < size < LARGE[0].nbytes + 3_000
    assert all(own < LARGE[1].nbytes + 3_000 for own in stores[0].sizes().values())


def test_small_states_are_stored_without_shared_parts(tmp_path: Path) -> None:
    store = FolderCheckpoints(tmp_path, "w")
    for number in range(3):
        store.save(StateKey(f"{number:032x}"), {"x": np.zeros(1_000), "n": number}, step=number, parent=None)
    assert store.parts() == {}


def test_only_the_tensors_seen_last_are_remembered_for_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpstage.checkpoints.sharing._MOST", 4)
    sharing, flat = Sharing(), flatten({str(number): LARGE[number] for number in range(3)})
    sharing.meet(KEYS[0], ["a", "b", "c"])
    sharing.meet(KEYS[1], ["b", "d", "e", "f"])
    assert [*sharing.to_place(KEYS[2], flat, ["a", "b", "d"])] == ["b", "d"]
    assert [*sharing.to_place(KEYS[1], flat, ["a", "b", "d"])] == ["b"], "others had it"


def test_a_loaded_state_shares_tensors_that_are_already_in_memory(tmp_path: Path) -> None:
    base = torch.randn(200, 200)
    lazy_copies.allow_copies(base)
    states = {key: {"base": base, "own": torch.full((9,), number)} for number, key in enumerate(KEYS[:3])}
    digests = {key: digest(state) for key, state in states.items()}
    store = FolderCheckpoints(tmp_path, "w")
    for key, state in states.items():
        store.save(key, state, step=0, parent=None)
    for other in (store, FolderCheckpoints(tmp_path, "w")):
        loaded: list[dict[str, torch.Tensor]] = [other.load(key) for key in KEYS[1:3]]  # type: ignore[misc]
        addresses = {lazy_copies.address_of(state["base"]) for state in loaded}
        assert addresses == {lazy_copies.address_of(base)} if other is store else len(addresses) == 1
        loaded[0]["base"].zero_()
        assert digest(loaded[1]) == digests[KEYS[2]]
        assert digest(other.load(KEYS[1])) == digests[KEYS[1]]
    assert digest(states[KEYS[0]]) == digests[KEYS[0]]


def test_a_state_whose_shared_part_is_missing_is_loaded_if_its_tensors_are_in_memory(tmp_path: Path) -> None:
    states = {key: {"base": torch.ones(200, 200), "own": number} for number, key in enumerate(KEYS[:2])}
    store = FolderCheckpoints(tmp_path, "w")
    for key, state in states.items():
        store.save(key, state, step=0, parent=None)
    reader = FolderCheckpoints(tmp_path, "w")
    reader.load(KEYS[1])
    (part,) = store.parts()
    store.delete(part)
    assert digest(reader.load(KEYS[1])) == digest(states[KEYS[1]])
    with pytest.raises(CheckpointCorrupt, match=r"a part of .* cannot be used"):
        store.load(KEYS[1])
