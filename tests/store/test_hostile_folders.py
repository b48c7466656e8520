"""Whoever can write to a folder of checkpoints can damage them, and do nothing else: no hang, no bomb, no way out."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import xxhash

from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints import format as files
from hpstage.checkpoints.formatted import log_path
from hpstage.checkpoints.stage_log import StageLog
from hpstage.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing
from hpstage.plan.facts import StateKey

pytestmark = [pytest.mark.sampled(4), pytest.mark.usefixtures("own_files")]

KEY = StateKey("0" * 31 + "a")
STATE = {"w": torch.arange(5.0), "step": 7}
NAMES = [files.MANIFEST, files.STRUCTURE, files.TENSORS]
TERABYTE = 10**12


@pytest.fixture
def store(tmp_path: Path) -> FolderCheckpoints:
    store = FolderCheckpoints(tmp_path / "checkpoints", "workload")
    store.save(KEY, STATE, step=7, parent=None)
    return store


def folder_of(store: FolderCheckpoints) -> Path:
    return store.path / KEY[:2] / KEY


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(path.parent)  # a path of such a socket is short
        listener.bind(path.name)
        os.chdir(here)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, TERABYTE)


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root can make a device")


HOSTILE: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a socket": bind,
    "a device": device,
    "a link to a device without end": lambda path: path.symlink_to("/dev/zero"),
    "a link to a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a link to another file": lambda path: path.symlink_to("/etc/passwd"),
    "a link to a folder": lambda path: path.symlink_to("/"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a terabyte": sparse,
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_device_or_link_in_place_of_a_checkpoint_file_is_corrupt_until_saved_again(
    store: FolderCheckpoints, name: str, what: str
) -> None:
    path = folder_of(store) / name
    path.unlink()
    HOSTILE[what](path)
    missing = (name, what) == (files.MANIFEST, "a link to nothing")
    for read in (store.load, store.verify):
        with pytest.raises(CheckpointError if missing else CheckpointCorrupt) as damage:
            read(KEY)
        assert missing or str(path.parent) in str(damage.value)
    assert list(store.keys()) in ([KEY], [])
    store.sizes(), store.usage()
    store.save(KEY, STATE, step=7, parent=None)
    store.verify(KEY)
    store.delete(KEY)
    assert not os.path.lexists(path.parent)
    assert Path("/etc/passwd").read_bytes()


@pytest.mark.parametrize("what", [what for what in HOSTILE if what != "a folder"])
def test_a_file_in_place_of_a_checkpoint_folder_is_corrupt_until_saved_again(
    store: FolderCheckpoints, what: str
) -> None:
    folder = folder_of(store)
    shutil.rmtree(folder)
    HOSTILE[what](folder)
    for read in (store.load, store.verify):
        with pytest.raises(CheckpointMissing if what == "a link to nothing" else CheckpointCorrupt):
            read(KEY)
    assert list(store.keys()) == [] and store.usage().bytes == 0
    store.save(KEY, STATE, step=7, parent=None)
    store.verify(KEY)
    assert not folder.is_symlink()
    assert list((store.path / ".tmp").iterdir()) == []


@pytest.mark.parametrize("what", [what for what in HOSTILE if what not in ("a terabyte", "a link to nothing")])
def test_a_stage_log_or_folder_identity_that_is_not_a_file_raises_an_error(store: FolderCheckpoints, what: str) -> None:
    store.identity()
    store.save_log(KEY, StageLog(0, 1))
    for path, read in (
        (store.path / log_path(KEY), lambda: store.load_log(KEY)),
        (store.path / ".place" / "name", store.prove),
    ):
        path.unlink()
        HOSTILE[what](path)
        with pytest.raises(CheckpointError):
            read()


def test_removing_a_checkpoint_folder_that_is_a_link_keeps_the_target_of_the_link(
    store: FolderCheckpoints, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    folder_of(store).rename(precious)
    (precious / files.TENSORS).write_bytes(b"mine")
    folder_of(store).symlink_to(precious)
    with pytest.raises(CheckpointCorrupt):
        store.load(KEY)
    store.save(KEY, STATE, step=7, parent=None)
    store.verify(KEY)
    assert not folder_of(store).is_symlink()
    store.delete(KEY)
    assert (precious / files.TENSORS).read_bytes() == b"mine"
    assert sorted(path.name for path in precious.iterdir()) == sorted(NAMES)


BOMBS: dict[str, Callable[[], object]] = {
    "one leaf": lambda: [{"name": "a", "kind": "torch", "dtype": "int8", "shape": [TERABYTE]}],
    "bytes": lambda: [{"name": "a", "kind": "bytes", "dtype": "uint8", "shape": [TERABYTE]}],
    "an array": lambda: [{"name": "a", "kind": "numpy", "dtype": "<f8", "shape": [TERABYTE // 8]}],
    "many leaves": lambda: [{"name": f"{i}", "kind": "torch", "dtype": "int8", "shape": [10**7]} for i in range(10**5)],
    "nothing of nothing": lambda: [{"name": "a", "kind": "torch", "dtype": "int8", "shape": [0, 1 << 62, 1 << 62]}],
}


@pytest.mark.ci
@pytest.mark.parametrize("which", BOMBS)
def test_a_structure_that_declares_a_terabyte_is_refused_without_allocating_it(
    store: FolderCheckpoints, which: str
) -> None:
    folder = folder_of(store)
    content = msgspec.json.encode({"tree": ["leaf", 0], "leaves": BOMBS[which]()})
    (folder / files.STRUCTURE).write_bytes(content)
    manifest = store.manifest(KEY)
    checksums = {**manifest.files, files.STRUCTURE: xxhash.xxh3_128_hexdigest(content)}
    forged = msgspec.structs.replace(manifest, files=checksums, bytes=TERABYTE + len(content))
    (folder / files.MANIFEST).write_bytes(files.encode_manifest(forged))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for read in (store.load, store.verify):
        with pytest.raises(CheckpointCorrupt):
            read(KEY)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4 * len(content) / 1024 + 2**21, "in KiB"


@pytest.mark.parametrize("name", [files.MANIFEST, files.STRUCTURE, "log"])
def test_a_checkpoint_file_of_a_terabyte_is_refused_without_reading_it(store: FolderCheckpoints, name: str) -> None:
    store.save_log(KEY, StageLog(0, 1))
    path = store.path / log_path(KEY) if name == "log" else folder_of(store) / name
    manifest = store.manifest(KEY)
    (folder_of(store) / files.MANIFEST).write_bytes(
        files.encode_manifest(msgspec.structs.replace(manifest, bytes=2 * TERABYTE))
    )
    path.unlink()
    sparse(path)
    script = f"""
    from pathlib import Path
    from hpstage.checkpoints import FolderCheckpoints
    from hpstage.errors import CheckpointCorrupt
    store = FolderCheckpoints({str(store.path)!r}, "workload")
    try:
        store.load_log({KEY!r}) if {name == "log"} else store.load({KEY!r})
    except CheckpointCorrupt:
        print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2**20, "in KiB"
