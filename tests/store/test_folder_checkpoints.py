"""FolderCheckpoints: the contract, every damage noticed, nothing left behind, an open format."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpstage.checkpoints import CheckpointStore, FolderCheckpoints, Manifest
from hpstage.checkpoints import format as files
from hpstage.checkpoints.leaves import _NUMPY, _TORCH
from hpstage.checkpoints.processes import host_digest
from hpstage.checkpoints.state_tree import digest
from hpstage.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing, UsageError
from hpstage.plan.facts import StateKey
from hpstage.testing import CheckpointContract

KEY = StateKey("0" * 31 + "a")
OTHER = StateKey("0" * 31 + "b")
STATE = {"w": torch.arange(5.0), "n": np.arange(3), "raw": b"bytes", "step": 7}
FILES = (files.TENSORS, files.STRUCTURE, files.MANIFEST)


class TestFolderCheckpoints(CheckpointContract):
    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Callable[[], CheckpointStore]:
        return functools.partial(FolderCheckpoints, tmp_path / "deep" / "checkpoints", "workload")


@pytest.mark.usefixtures("own_files")
class TestFolderCheckpointsWithFilesOfTheirOwn(TestFolderCheckpoints):
    pass


@pytest.fixture
def store(tmp_path: Path, own_files: None) -> FolderCheckpoints:
    return FolderCheckpoints(tmp_path / "checkpoints", "workload")


def saved(store: FolderCheckpoints, key: StateKey = KEY) -> Path:
    store.save(key, STATE, step=7, parent=None)
    return store.path / key[:2] / key


def left_behind(store: FolderCheckpoints) -> list[str]:
    return [str(path.relative_to(store.path)) for path in store.path.rglob("*") if path.is_file()]


def rewrite_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / files.MANIFEST).write_bytes(files.encode_manifest(manifest))


# --- every dtype ------------------------------------------------------------------------------------------

HERE = [dtype for dtype in _TORCH if hasattr(torch, dtype)]
"""What this torch has."""


@pytest.mark.parametrize("dtype", HERE)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 1)])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_torch_tensors_of_every_dtype_and_shape_are_loaded_as_saved(
    store: FolderCheckpoints, dtype: str, shape: tuple[int, ...]
) -> None:
    _, size, count = _TORCH[dtype]
    values = int(np.prod(shape)) * size * count
    raw = torch.arange(values, dtype=torch.uint8) % 2
    tensor = raw.view(getattr(torch, dtype)).reshape(shape)
    store.save(KEY, {"flag": b"x", "t": tensor}, step=0, parent=None)
    loaded = store.load(KEY)
    assert isinstance(loaded, dict)
    assert (loaded["t"].dtype, loaded["t"].shape) == (tensor.dtype, tensor.shape)
    assert loaded["t"].reshape(-1).view(torch.uint8).tolist() == raw.tolist()


@pytest.mark.parametrize("dtype", _NUMPY)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 1)])
def test_numpy_arrays_of_every_dtype_and_shape_are_loaded_as_saved(
    store: FolderCheckpoints, dtype: str, shape: tuple[int, ...]
) -> None:
    array = (np.arange(np.prod(shape)) % 3).astype(dtype).reshape(shape)
    store.save(KEY, {"flag": b"x", "a": array, "s": np.dtype(dtype).type(1)}, step=0, parent=None)
    loaded = store.load(KEY)
    assert isinstance(loaded, dict)
    assert (loaded["a"].dtype.str, loaded["a"].shape) == (dtype, shape)
    assert np.array_equal(loaded["a"], array)
    assert type(loaded["s"]) is np.dtype(dtype).type
    assert loaded["s"] == 1


def test_strided_expanded_and_tied_tensors_are_saved_by_value(store: FolderCheckpoints) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    state = {
        "strided": base[:, ::2, 1:3],
        "expanded": torch.ones(1).expand(1000),
        "channels_last": torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
        "part of a large storage": torch.zeros(100_000)[:2],
        "tied": [base, base],
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "negated": torch.tensor([1 + 2j]).conj().imag,
        "one element with a stride": torch.arange(4.0)[::2][:1],
        "one element of an array": np.arange(4.0)[::2][:1],
        "one element by one": np.arange(4.0).reshape(2, 2).T[:1, :1],
    }
    kept = store.save(KEY, state, step=0, parent=None)
    loaded = store.load(KEY)
    assert digest(loaded) == digest(state) == kept.digest
    assert kept.bytes < 10_000
    assert isinstance(loaded, dict)
    loaded["tied"][0] += 1
    assert torch.equal(loaded["tied"][1], base)
    assert torch.equal(loaded["conjugated"], torch.tensor([1 - 2j]))


def test_saving_and_loading_ignore_torchs_default_dtype_and_device(store: FolderCheckpoints) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        saved(store)
        assert digest(store.load(KEY)) == digest(STATE)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_the_safetensors_library_can_open_the_tensors_of_a_checkpoint(store: FolderCheckpoints) -> None:
    tensors = {
        f"{dtype}-{count}": torch.zeros(count, dtype=getattr(torch, dtype))
        for dtype in HERE
        if dtype != "complex32"
        for count in (0, 1, 3)
    }
    state = {"model": tensors, 1: np.arange(3, dtype=">f4"), "1": torch.ones(2), "__metadata__": np.ones(2)}
    store.save(KEY, state, step=0, parent=None)
    path = store.path / KEY[:2] / KEY / files.TENSORS
    opened = safetensors.torch.load_file(path)
    assert len(opened) == len(tensors) + 3
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0  # the values begin aligned
    assert torch.equal(opened["model.float32-3"], tensors["float32-3"])
    assert torch.equal(opened["model.complex64-3"], torch.zeros(3, 2))
    assert torch.equal(opened["1'"], torch.ones(2))
    assert np.array_equal(safetensors.torch.load_file(path)["1"].numpy().view(">f4").ravel(), np.arange(3))


# --- damage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_checkpoint_file_is_detected_on_load(store: FolderCheckpoints, name: str) -> None:
    path = saved(store) / name
    content = path.read_bytes()
    for length in (0, 1, 9, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointCorrupt, match=KEY):
            store.load(KEY)


@pytest.mark.parametrize("name", FILES)
def test_trailing_bytes_in_a_checkpoint_file_are_detected_on_load(store: FolderCheckpoints, name: str) -> None:
    path = saved(store) / name
    path.write_bytes(path.read_bytes() + b"\x00")
    with pytest.raises(CheckpointCorrupt, match=KEY):
        store.load(KEY)


@settings(
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(name=st.sampled_from(FILES), where=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_in_a_checkpoint_file_is_detected_on_load(
    store: FolderCheckpoints, name: str, where: int, bit: int
) -> None:
    path = saved(store) / name
    content = bytearray(path.read_bytes())
    content[where % len(content)] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match=KEY):
        store.load(KEY)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_checkpoint_file_is_named_on_load(store: FolderCheckpoints, name: str) -> None:
    (saved(store) / name).unlink()
    with pytest.raises(CheckpointCorrupt, match=f"lacks {name}"):
        store.load(KEY)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("garbage", [b"", b"null", b"{}", b"[1", b"\xff\xfe", b"[" * 100_000, b'{"manifest":1}'])
def test_garbage_in_place_of_a_checkpoint_file_is_detected_on_load(
    store: FolderCheckpoints, name: str, garbage: bytes
) -> None:
    (saved(store) / name).write_bytes(garbage)
    with pytest.raises(CheckpointCorrupt, match=KEY):
        store.load(KEY)


def test_a_checkpoint_stored_under_the_key_of_another_state_is_refused_on_load(store: FolderCheckpoints) -> None:
    mine, other = saved(store), saved(store, OTHER)
    shutil.rmtree(mine)
    other.rename(mine)
    with pytest.raises(CheckpointCorrupt, match=f"another state, {OTHER}"):
        store.load(KEY)


def test_a_tensor_file_copied_from_another_state_is_detected_on_load(store: FolderCheckpoints) -> None:
    mine = saved(store)
    store.save(OTHER, {**STATE, "w": torch.arange(5.0) + 1}, step=7, parent=None)
    shutil.copy(store.path / OTHER[:2] / OTHER / files.TENSORS, mine)
    with pytest.raises(CheckpointCorrupt, match="does not match the checksum"):
        store.load(KEY)


def test_the_checkpoint_of_another_workload_is_refused(store: FolderCheckpoints) -> None:
    saved(store)
    with pytest.raises(CheckpointCorrupt, match="belongs to workload workload, not to other"):
        FolderCheckpoints(store.path, "other").load(KEY)


def test_a_checkpoint_in_a_newer_format_is_refused(store: FolderCheckpoints) -> None:
    folder = saved(store)
    rewrite_manifest(folder, msgspec.structs.replace(store.manifest(KEY), format=files.COMPRESSED + 1))
    expected = f"has format {files.COMPRESSED + 1}; this hpstage reads formats {files.FORMAT} to {files.COMPRESSED}"
    with pytest.raises(CheckpointCorrupt, match=expected):
        store.load(KEY)


@pytest.mark.parametrize(
    "structure",
    [
        {"tree": ["leaf", 3], "leaves": []},
        {"tree": ["unknown", []], "leaves": []},
        {"tree": ["dict", [[["list", []], 1]]], "leaves": []},
        {"tree": ["float", "zz"], "leaves": []},
        {"tree": ["scalar", "|O", "00"], "leaves": []},
        {"tree": {}, "leaves": []},
        {"tree": [], "leaves": []},
        {"tree": functools.reduce(lambda tree, _: ["list", [tree]], range(5000), 1), "leaves": []},
        {"tree": 1, "leaves": [{"name": "a", "kind": "torch", "dtype": "device", "shape": [1]}]},
        {"tree": 1, "leaves": [{"name": "a", "kind": "numpy", "dtype": "|O8", "shape": [1]}]},
        {"tree": 1, "leaves": [{"name": "a", "kind": "pickle", "dtype": "int8", "shape": [1]}]},
        {"tree": 1, "leaves": [{"name": "a", "kind": "torch", "dtype": "int8", "shape": [1 << 60]}]},
        {"tree": 1, "leaves": [{"name": "a", "kind": "torch", "dtype": "int8", "shape": [-8]}]},
    ],
)
def test_a_malformed_structure_file_with_a_valid_checksum_is_refused(
    store: FolderCheckpoints, structure: object
) -> None:
    folder = saved(store)
    sys.setrecursionlimit(20_000)
    content = json.dumps(structure).encode()
    sys.setrecursionlimit(1000)
    (folder / files.STRUCTURE).write_bytes(content)
    manifest = store.manifest(KEY)
    checksums = {**manifest.files, files.STRUCTURE: xxhash.xxh3_128_hexdigest(content)}
    size = (folder / files.TENSORS).stat().st_size + len(content)
    rewrite_manifest(folder, msgspec.structs.replace(manifest, files=checksums, bytes=size))
    for read in (store.load, store.verify):
        with pytest.raises(CheckpointCorrupt, match=KEY):
            read(KEY)


MANY = {f"layers.{layer}.weight": torch.full((2,), float(layer)) for layer in range(500)}


def test_the_structure_file_of_a_state_with_many_leaves_is_compressed_to_few_bytes(store: FolderCheckpoints) -> None:
    store.save(KEY, MANY, step=7, parent=None)
    folder = store.path / KEY[:2] / KEY
    assert (folder / files.STRUCTURE).stat().st_size < 10_000
    assert store.manifest(KEY).format == files.COMPRESSED
    assert digest(store.load(KEY)) == digest(MANY)
    store.verify(KEY)


def test_a_structure_file_that_decompresses_beyond_the_limit_is_refused(
    store: FolderCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(KEY, MANY, step=7, parent=None)
    monkeypatch.setattr(files, "LONGEST", 20_000)  # more than its file
    with pytest.raises(CheckpointCorrupt, match=KEY):
        store.load(KEY)


@pytest.mark.parametrize(
    "content",
    [
        zlib.compress(b'{"tree": 1, "leaves": [' + bytes(10_000_000)),
        zlib.compress(b'{"tree": 1, "leaves": []}')[:-1],
        zlib.compress(b'{"tree": 1, "leaves": []}') + b"x",
        b'{"tree": 1, "leaves": []}',
        b"",
    ],
    ids=["a bomb", "cut off", "followed by more", "not compressed", "empty"],
)
def test_a_structure_file_with_invalid_compressed_data_is_refused(store: FolderCheckpoints, content: bytes) -> None:
    folder = saved(store)
    (folder / files.STRUCTURE).write_bytes(content)
    manifest = store.manifest(KEY)
    checksums = {**manifest.files, files.STRUCTURE: xxhash.xxh3_128_hexdigest(content)}
    size = (folder / files.TENSORS).stat().st_size + len(content)
    rewrite_manifest(folder, msgspec.structs.replace(manifest, files=checksums, bytes=size, format=files.COMPRESSED))
    for read in (store.load, store.verify):
        with pytest.raises(CheckpointCorrupt, match=KEY):
            read(KEY)


@pytest.mark.parametrize("name", FILES)
def test_saving_again_replaces_a_damaged_checkpoint(store: FolderCheckpoints, name: str) -> None:
    path = saved(store) / name
    path.write_bytes(b"damaged")
    saved(store)
    assert digest(store.load(KEY)) == digest(STATE)
    assert len(left_behind(store)) == 3


def test_a_damaged_checkpoint_is_listed_and_can_be_deleted(store: FolderCheckpoints) -> None:
    (saved(store) / files.TENSORS).unlink()
    assert list(store.keys()) == [KEY]
    store.delete(KEY)
    with pytest.raises(CheckpointMissing):
        store.load(KEY)
    assert left_behind(store) == []


# --- disks and writers that fail --------------------------------------------------------------------------


def test_saving_to_a_full_disk_raises_an_error_with_a_remedy_and_leaves_no_files(
    store: FolderCheckpoints, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    large = {"w": torch.zeros(100_000)}
    with full_disk(50_000), pytest.raises(CheckpointError, match=rf"{KEY} under {store.path}.*free space"):
        store.save(KEY, large, step=0, parent=None)
    assert left_behind(store) == []
    assert list(store.keys()) == []
    assert os.listdir(store.path / ".tmp") == []
    store.save(KEY, large, step=0, parent=None)
    assert digest(store.load(KEY)) == digest(large)


def test_saving_to_a_read_only_folder_raises_an_error_with_a_remedy(
    open_folder: Path, unprivileged: Callable[[], AbstractContextManager[None]]
) -> None:
    open_folder.chmod(0o555)
    store = FolderCheckpoints(open_folder, "workload")
    with unprivileged(), pytest.raises(CheckpointError, match=rf"{open_folder}.*may read and write"):
        store.save(KEY, STATE, step=0, parent=None)
    open_folder.chmod(0o755)
    assert left_behind(store) == []


KILLED = """
import os, signal, sys, torch
from hpstage.checkpoints import FolderCheckpoints, format
format.encode_manifest = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
FolderCheckpoints(sys.argv[1], "workload").save("k" * 32, {"w": torch.zeros(10)}, step=0, parent=None)
"""


@pytest.mark.ci
def test_files_of_a_killed_writer_are_not_listed_as_a_checkpoint_and_are_swept(store: FolderCheckpoints) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(store.path)])
    assert done.returncode == -9
    assert len(left_behind(store)) == 2
    assert list(store.keys()) == []
    with pytest.raises(CheckpointMissing):
        store.load(StateKey("k" * 32))
    assert FolderCheckpoints(store.path, "workload").sweep() == 0
    assert left_behind(store) == []


def test_sweep_keeps_files_of_live_writers_and_of_other_hosts_for_a_day(store: FolderCheckpoints) -> None:
    def temporary(host: str, pid: int, age_hours: float) -> str:
        folder = store.path / ".tmp" / f"{host}-{pid}-{uuid.uuid4().hex}"
        folder.mkdir(parents=True)
        (folder / files.TENSORS).write_bytes(b"x")
        then = time.time() - age_hours * 3600
        os.utime(folder, (then, then))
        return folder.name

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    spared = [temporary(host_digest(), os.getpid(), 1), temporary("elsewhere", gone.pid, 23)]
    swept = [
        temporary(host_digest(), gone.pid, 0),
        temporary("elsewhere", 1, 25),
        temporary(host_digest(), os.getpid(), 25),
    ]
    assert store.sweep() == len(swept)
    assert sorted(os.listdir(store.path / ".tmp")) == sorted(spared)


def test_creating_folder_checkpoints_writes_nothing_to_disk(tmp_path: Path) -> None:
    assert list(FolderCheckpoints(tmp_path / "new", "workload").keys()) == []
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("key", ["", "a", "../../etc/passwd", "..", ".tmp", "a/b", "a\x00b", "x" * 129])
def test_a_state_key_that_is_invalid_or_a_path_is_refused(store: FolderCheckpoints, key: str) -> None:
    for call in (store.load, store.manifest, store.delete):
        with pytest.raises(UsageError, match="not a state key"):
            call(StateKey(key))


def test_other_files_in_the_folder_are_not_listed_as_checkpoints(store: FolderCheckpoints) -> None:
    folder = saved(store)
    (store.path / "README").write_text("notes")
    (folder.parent / "empty").mkdir()
    (folder.parent / ".hidden").mkdir()
    assert list(store.keys()) == [KEY]


def test_usage_counts_the_bytes_of_unpublished_checkpoints(store: FolderCheckpoints) -> None:
    saved(store)
    before = store.usage()
    assert before.bytes == sum(path.stat().st_size for path in store.path.rglob("*") if path.is_file())
    aside = store.path / ".tmp" / "elsewhere-1-x"
    aside.mkdir(parents=True)
    (aside / files.TENSORS).write_bytes(bytes(1000))
    assert store.usage() == msgspec.structs.replace(before, unpublished=1000)


def test_sizes_and_usage_count_damaged_checkpoints(store: FolderCheckpoints) -> None:
    (saved(store) / files.MANIFEST).write_bytes(bytes(100))
    (saved(store, OTHER) / files.TENSORS).unlink()
    folder = store.path / KEY[:2] / KEY
    assert store.sizes()[KEY] == sum(path.stat().st_size for path in folder.iterdir())
    assert store.usage().checkpoints == 2


def test_check_raises_if_the_folder_is_not_writable(
    open_folder: Path, unprivileged: Callable[[], AbstractContextManager[None]]
) -> None:
    open_folder.chmod(0o555)
    with unprivileged(), pytest.raises(CheckpointError, match=rf"cannot write checkpoints under {open_folder}"):
        FolderCheckpoints(open_folder, "workload").check()
    open_folder.chmod(0o755)
    assert os.listdir(open_folder) == []


@pytest.mark.slow
def test_usage_of_100000_checkpoints_takes_less_than_three_times_a_walk_of_their_folders(
    store: FolderCheckpoints,
) -> None:
    for number in range(100_000):
        key = f"{number * 7919:032x}"[::-1]
        folder = store.path / key[:2] / key
        folder.mkdir(parents=True)
        for name in FILES:
            (folder / name).touch()
    began = time.perf_counter()
    sizes = [os.stat(os.path.join(place, name)).st_size for place, _, names in os.walk(store.path) for name in names]
    walked = time.perf_counter()
    usage = store.usage()
    assert usage.checkpoints == 100_000 and len(sizes) >= 100_000 * len(FILES)
    assert time.perf_counter() - walked < 3 * (walked - began)


@pytest.mark.slow
def test_saving_fifty_megabytes_is_faster_than_torch_save(store: FolderCheckpoints, tmp_path: Path) -> None:
    state = {f"layer{number}": torch.randn(125_000) for number in range(100)}

    def seconds(action: Callable[[int], object]) -> float:
        times = []
        for number in range(7):
            began = time.perf_counter()
            action(number)
            times.append(time.perf_counter() - began)
        return min(times)

    ours = seconds(lambda number: store.save(StateKey(f"{number:032x}"), state, step=0, parent=None))
    theirs = seconds(lambda number: torch.save(state, tmp_path / f"{number}.pt"))
    assert ours < theirs


def test_all_paths_of_a_folder_have_one_identity_and_two_folders_have_two(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "one")
    one, linked, other = (FolderCheckpoints(tmp_path / name, "w") for name in ("one", "link", "other"))
    assert one.identity() == linked.identity() == FolderCheckpoints(tmp_path / "one", "another").identity() != ""
    assert other.identity() != one.identity()
    assert list(one.keys()) == []
    assert one.usage().bytes == 0
