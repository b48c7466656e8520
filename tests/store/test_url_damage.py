"""Damaged checkpoints behind a URL are noticed, named and replaced."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpstage.checkpoints import UrlCheckpoints
from hpstage.checkpoints import format as files
from hpstage.checkpoints.state_tree import digest
from hpstage.errors import CheckpointCorrupt, CheckpointMissing, UsageError
from hpstage.plan.facts import StateKey
from tests.store.url_checkpoints import FILES, KEY, OTHER, STATE, memory, names, saved


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_checkpoint_file_is_detected_on_load(store: UrlCheckpoints, name: str) -> None:
    path = saved(store)[name]
    content = memory.cat_file(path)
    for length in (0, 1, 9, len(content) // 2, len(content) - 1):
        memory.pipe_file(path, content[:length])
        with pytest.raises(CheckpointCorrupt, match=KEY):
            store.load(KEY)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("garbage", [b"", b"null", b"{}", b"[1", b"\xff\xfe", b"[" * 100_000, b'{"manifest":1}'])
def test_garbage_in_place_of_a_checkpoint_file_is_detected_on_load(
    store: UrlCheckpoints, name: str, garbage: bytes
) -> None:
    memory.pipe_file(saved(store)[name], garbage)
    with pytest.raises(CheckpointCorrupt, match=KEY):
        store.load(KEY)


@pytest.mark.parametrize("name", FILES)
def test_trailing_bytes_in_a_checkpoint_file_are_detected_on_load(store: UrlCheckpoints, name: str) -> None:
    path = saved(store)[name]
    memory.pipe_file(path, memory.cat_file(path) + b"\x00")
    with pytest.raises(CheckpointCorrupt, match=KEY):
        store.load(KEY)


@settings(
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(name=st.sampled_from(FILES), where=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_in_a_checkpoint_file_is_detected_on_load(
    store: UrlCheckpoints, name: str, where: int, bit: int
) -> None:
    store.delete(KEY)
    path = saved(store)[name]
    content = bytearray(memory.cat_file(path))
    content[where % len(content)] ^= 1 << bit
    memory.pipe_file(path, bytes(content))
    with pytest.raises(CheckpointCorrupt, match=KEY):
        store.load(KEY)


@pytest.mark.parametrize("name", ["tensors", "structure"])
def test_a_missing_checkpoint_file_is_named_on_load(store: UrlCheckpoints, name: str) -> None:
    path = saved(store)[name]
    memory.rm_file(path)
    with pytest.raises(CheckpointCorrupt, match=f"lacks {path.rpartition('/')[2]}"):
        store.load(KEY)


def test_a_checkpoint_without_its_manifest_counts_as_missing(store: UrlCheckpoints) -> None:
    memory.rm_file(saved(store)["manifest"])
    with pytest.raises(CheckpointMissing):
        store.load(KEY)
    assert list(store.keys()) == []


def test_the_checkpoint_of_another_state_or_workload_is_refused(store: UrlCheckpoints) -> None:
    mine, other = saved(store), saved(store, OTHER)
    memory.pipe_file(mine["manifest"], memory.cat_file(other["manifest"]))
    with pytest.raises(CheckpointCorrupt, match=f"another state, {OTHER}"):
        store.load(KEY)
    with pytest.raises(CheckpointCorrupt, match="belongs to workload workload, not to other"):
        UrlCheckpoints(store.url, "other").load(OTHER)


@pytest.mark.parametrize("name", ["../../secret", "state-../x.json", "manifest.json", "state-.json", "x.safetensors"])
def test_a_manifest_that_names_other_files_than_its_own_two_is_refused(store: UrlCheckpoints, name: str) -> None:
    manifest_path = saved(store)["manifest"]
    manifest = store.manifest(KEY)
    tensors, structure = files.data_files(store._place(KEY), manifest)
    both = {name: manifest.files[name] for name in (tensors, structure)}
    for named in (
        {tensors: both[tensors], name: "0" * 32},
        {structure: both[structure], name: "0" * 32},
        {**both, "state-0123.json": "0" * 32},
    ):
        memory.pipe_file(manifest_path, files.encode_manifest(msgspec.structs.replace(manifest, files=named)))
        with pytest.raises(CheckpointCorrupt, match="does not name the two files"):
            store.load(KEY)


@pytest.mark.parametrize("name", FILES)
def test_saving_again_replaces_a_damaged_checkpoint(store: UrlCheckpoints, name: str) -> None:
    memory.pipe_file(saved(store)[name], b"damaged")
    saved(store)
    assert digest(store.load(KEY)) == digest(STATE)
    # What a spoilt manifest named is swept some day, the rest is gone at once.
    assert len(names(store)) == (5 if name == "manifest" else 3)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_listed_and_can_be_deleted(store: UrlCheckpoints, name: str) -> None:
    memory.pipe_file(saved(store)[name], b"damaged")
    assert list(store.keys()) == [KEY]
    store.delete(KEY)
    assert list(store.keys()) == []
    with pytest.raises(CheckpointMissing):
        store.load(KEY)


@pytest.mark.parametrize("key", ["", "a", "../../etc/passwd", "..", ".tmp", "a/b", "a\x00b", "x" * 129])
def test_a_state_key_that_is_invalid_or_a_path_is_refused(store: UrlCheckpoints, key: str) -> None:
    for call in (store.load, store.manifest, store.delete):
        with pytest.raises(UsageError, match="not a state key"):
            call(StateKey(key))
