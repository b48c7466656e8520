"""UrlCheckpoints: the contract in memory and on a file system; large states; locations."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpstage.checkpoints import CheckpointStore, FolderCheckpoints, UrlCheckpoints, open_checkpoints, remote
from hpstage.checkpoints.state_tree import digest
from hpstage.errors import CheckpointCorrupt, UsageError
from hpstage.testing import CheckpointContract
from tests.store.url_checkpoints import KEY, OTHER, STATE, a_day_passes, memory, names, paths


class TestInMemory(CheckpointContract):
    processes = False

    @pytest.fixture
    def open_store(self, place: str) -> Callable[[], CheckpointStore]:
        return functools.partial(UrlCheckpoints, place, "workload")


class TestOnAFileSystem(CheckpointContract):
    """Folders that must be made, files that are seen half written, names that are taken: as on SFTP or SMB."""

    @pytest.fixture
    def open_store(self, tmp_path: Path) -> Callable[[], CheckpointStore]:
        return functools.partial(UrlCheckpoints, f"file://{tmp_path}/checkpoints", "workload")


def test_checkpoint_files_written_in_many_pieces_are_loaded_as_saved(
    store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_PIECE", 1000)
    monkeypatch.setattr(remote, "_BATCH", 3500)
    state = {f"t{n}": torch.randn(n * 37 % 1500) for n in range(40)} | {"raw": os.urandom(10_000), "none": b""}
    kept = store.save(KEY, state, step=0, parent=None)
    assert digest(store.load(KEY)) == digest(state) == kept.digest
    path = paths(store)["tensors"]
    memory.pipe_file(path, memory.cat_file(path)[:-1] + b"\x00")
    with pytest.raises(CheckpointCorrupt):
        store.load(KEY)


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}", "local://{}", "FILE://{}"])
def test_a_path_or_file_url_opens_folder_checkpoints(tmp_path: Path, form: str) -> None:
    opened = open_checkpoints(form.format(tmp_path / "a"), "workload")
    assert isinstance(opened, FolderCheckpoints)
    assert opened.path == tmp_path / "a"


def test_a_path_with_special_characters_and_its_file_url_open_the_same_folder(tmp_path: Path) -> None:
    path = tmp_path / "50% of é"
    for location in (path, str(path), path.as_uri()):
        opened = open_checkpoints(location, "workload")
        assert isinstance(opened, FolderCheckpoints) and opened.path == path


def test_a_url_that_is_not_a_file_url_opens_url_checkpoints(place: str) -> None:
    opened = open_checkpoints(place, "workload", storage_options={"a": 1})
    assert isinstance(opened, UrlCheckpoints)
    assert (opened.url, opened.workload) == (place, "workload")
    assert repr(opened) == f"UrlCheckpoints({place!r}, workload='workload')"


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("nonsense://bucket", "nonsense://bucket: Protocol not known: nonsense"),
        ("file://host/path", "another host"),
        ("file://relative", "another host, or no absolute path"),
        ("file:///a%00b", "no absolute path"),
        ("file://[/a", "is not a URL"),
    ],
)
def test_an_invalid_checkpoint_location_is_refused(location: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_checkpoints(location, "workload")


def test_storage_options_for_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no storage_options"):
        open_checkpoints(tmp_path, "workload", storage_options={"key": "a"})


def test_a_missing_fsspec_driver_is_named_with_its_install_command() -> None:
    script = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from hpstage.checkpoints import open_checkpoints\n"
        "from hpstage.errors import UsageError\n"
        "try: open_checkpoints('s3://user:hunter2@bucket/prefix', 'w')\n"
        "except UsageError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "the driver of s3:// is not installed" in done.stdout, done.stderr
    assert "pip install s3fs" in done.stdout
    assert "hunter2" not in done.stdout


def test_fsspec_is_imported_only_when_a_url_is_opened() -> None:
    script = (
        "import sys, hpstage.checkpoints as c\n"
        "c.open_checkpoints('.', 'w')\n"
        "assert not {'fsspec', 'torch', 'numpy', 'asyncio'} & set(sys.modules)\n"
        "c.open_checkpoints('memory://x', 'w')\n"
        "assert 'fsspec' in sys.modules and not {'torch', 'numpy', 's3fs'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("own_files")
def test_a_folder_of_checkpoints_copied_to_a_url_and_back_can_be_loaded(tmp_path: Path, place: str) -> None:
    folder = FolderCheckpoints(tmp_path / "folder", "workload")
    folder.save(KEY, STATE, step=7, parent=None)
    memory.put(f"{folder.path}/", place.removeprefix("memory:/"), recursive=True)
    there = UrlCheckpoints(place, "workload")
    assert digest(there.load(KEY)) == digest(STATE)
    assert there.save(KEY, STATE, step=7, parent=None) == folder.save(KEY, STATE, step=7, parent=None)
    there.save(OTHER, STATE, step=7, parent=KEY)
    a_day_passes(there)
    assert there.sweep() == 0
    back = FolderCheckpoints(tmp_path / "back", "workload")
    memory.get(f"{place.removeprefix('memory:/')}/", f"{back.path}/", recursive=True)
    assert list(back.keys()) == [KEY, OTHER]
    for key in (KEY, OTHER):
        assert digest(back.load(key)) == digest(STATE)
    there.delete(KEY)
    there.delete(OTHER)
    assert names(there) == []
