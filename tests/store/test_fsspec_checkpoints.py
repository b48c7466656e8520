"""UrlCheckpoints: the contract in memory, on a file system and on a server of S3; damage, races, faults, secrets."""

from __future__ import annotations

import errno
import functools
import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpstage.checkpoints import CheckpointStore, FolderCheckpoints, UrlCheckpoints, open_checkpoints, remote, url
from hpstage.checkpoints import format as files
from hpstage.checkpoints.state_tree import digest
from hpstage.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing, UsageError
from hpstage.events import StateKey
from hpstage.testing import CheckpointContract

KEY = StateKey("0" * 31 + "a")
OTHER = StateKey("0" * 31 + "b")
STATE = {"w": torch.arange(5.0), "n": np.arange(3), "raw": b"bytes", "step": 7}

memory = fsspec.filesystem("memory")


@pytest.fixture
def place() -> Iterator[str]:
    """A URL in the memory of this process, empty and its own."""
    name = f"/{uuid.uuid4().hex}"
    yield f"memory:/{name}"
    if memory.exists(name):
        memory.rm(name, recursive=True)


@pytest.fixture
def store(place: str, monkeypatch: pytest.MonkeyPatch) -> UrlCheckpoints:
    # Memory is written at once: there is no need to wait for the rest of a manifest.
    monkeypatch.setattr(url, "_LOOKS", (0.0, 0.0, 0.0))
    return UrlCheckpoints(place, "workload")


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PAUSES", (0.0, 0.0))


def names(store: UrlCheckpoints) -> list[str]:
    """Every file below the store's URL, by its path there."""
    return sorted(store._remote.sizes())


def saved(store: UrlCheckpoints, key: StateKey = KEY) -> dict[str, str]:
    """Full path in memory of the manifest, the tensors and the structure of a checkpoint that is saved here."""
    store.save(key, STATE, step=7, parent=None)
    return paths(store, key)


def paths(store: UrlCheckpoints, key: StateKey = KEY) -> dict[str, str]:
    root = store.url.removeprefix("memory:/")
    manifest = store.manifest(key)
    tensors, structure = files.data_files(store._place(key), manifest)
    folder = f"{root}/{key[:2]}/{key}"
    return {
        "manifest": f"{folder}/{files.MANIFEST}",
        "tensors": f"{folder}/{tensors}",
        "structure": f"{folder}/{structure}",
    }


# --- the contract -----------------------------------------------------------------------------------------


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


# --- damage -----------------------------------------------------------------------------------------------

FILES = ("manifest", "tensors", "structure")


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_noticed(store: UrlCheckpoints, name: str) -> None:
    path = saved(store)[name]
    content = memory.cat_file(path)
    for length in (0, 1, 9, len(content) // 2, len(content) - 1):
        memory.pipe_file(path, content[:length])
        with pytest.raises(CheckpointCorrupt, match=KEY):
            store.load(KEY)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("garbage", [b"", b"null", b"{}", b"[1", b"\xff\xfe", b"[" * 100_000, b'{"manifest":1}'])
def test_garbage_in_place_of_a_file_is_noticed(store: UrlCheckpoints, name: str, garbage: bytes) -> None:
    memory.pipe_file(saved(store)[name], garbage)
    with pytest.raises(CheckpointCorrupt, match=KEY):
        store.load(KEY)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_goes_on_is_noticed(store: UrlCheckpoints, name: str) -> None:
    path = saved(store)[name]
    memory.pipe_file(path, memory.cat_file(path) + b"\x00")
    with pytest.raises(CheckpointCorrupt, match=KEY):
        store.load(KEY)


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(name=st.sampled_from(FILES), where=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_wherever_it_is(store: UrlCheckpoints, name: str, where: int, bit: int) -> None:
    store.delete(KEY)
    path = saved(store)[name]
    content = bytearray(memory.cat_file(path))
    content[where % len(content)] ^= 1 << bit
    memory.pipe_file(path, bytes(content))
    with pytest.raises(CheckpointCorrupt, match=KEY):
        store.load(KEY)


@pytest.mark.parametrize("name", ["tensors", "structure"])
def test_a_missing_file_is_noticed_and_named(store: UrlCheckpoints, name: str) -> None:
    path = saved(store)[name]
    memory.rm_file(path)
    with pytest.raises(CheckpointCorrupt, match=f"lacks {path.rpartition('/')[2]}"):
        store.load(KEY)


def test_without_its_manifest_a_checkpoint_is_missing(store: UrlCheckpoints) -> None:
    memory.rm_file(saved(store)["manifest"])
    with pytest.raises(CheckpointMissing):
        store.load(KEY)
    assert list(store.keys()) == []


def test_the_checkpoint_of_another_state_or_workload_is_refused(store: UrlCheckpoints) -> None:
    mine, other = saved(store), saved(store, OTHER)
    memory.pipe_file(mine["manifest"], memory.cat_file(other["manifest"]))
    with pytest.raises(CheckpointCorrupt, match=f"another state, {OTHER}"):
        store.load(KEY)
    with pytest.raises(CheckpointCorrupt, match="of workload workload, not other"):
        UrlCheckpoints(store.url, "other").load(OTHER)


@pytest.mark.parametrize("name", ["../../secret", "state-../x.json", "manifest.json", "state-.json", "x.safetensors"])
def test_a_manifest_that_names_files_elsewhere_is_refused(store: UrlCheckpoints, name: str) -> None:
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
def test_a_key_that_would_lead_elsewhere_is_refused(store: UrlCheckpoints, key: str) -> None:
    for call in (store.load, store.manifest, store.delete):
        with pytest.raises(UsageError, match="no state key"):
            call(StateKey(key))


# --- writers: second ones, dead ones, living ones ---------------------------------------------------------


class Dying(BaseException):
    """What a kill would be, seen from within."""


def wrap(patch: pytest.MonkeyPatch, method: str, around: Callable[..., Any]) -> None:
    """Let ``around(call, path, **options)`` stand for a method of the driver; ``call()`` does what was asked."""
    original = getattr(type(memory), method)

    def wrapped(self: Any, path: Any, *arguments: Any, **options: Any) -> Any:
        return around(lambda: original(self, path, *arguments, **options), path, **options)

    patch.setattr(type(memory), method, wrapped)


def before_the_manifest(patch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """``action`` happens when the next writer has written its files, and is about to write the manifest."""
    due = [action]

    def around(call: Callable[[], Any], path: str, **options: Any) -> Any:
        if options.get("mode") == "create" and due:
            due.pop()()
        return call()

    wrap(patch, "pipe_file", around)


def a_day_passes(store: UrlCheckpoints) -> None:
    for path in memory.find(store.url.removeprefix("memory:/")):
        memory.store[path].modified -= timedelta(days=1, minutes=1)


def test_whenever_a_writer_dies_there_is_a_whole_checkpoint_or_none_and_its_rests_are_swept(place: str) -> None:
    outcomes = set()
    for requests in range(1, 12):
        store = UrlCheckpoints(f"{place}/{requests}", "workload")
        left = itertools.count(requests, -1)

        def dying(call: Callable[[], Any], *_: Any, left: Iterator[int] = left, **__: Any) -> Any:
            if next(left) <= 0:
                raise Dying
            return call()

        with pytest.MonkeyPatch.context() as patch, suppress(Dying):
            for method in ("pipe_file", "open", "rm_file", "cat_file"):
                wrap(patch, method, dying)
            store.save(KEY, STATE, step=7, parent=None)
        kept = list(store.keys()) == [KEY]
        outcomes.add((kept, len(names(store))))
        assert store.usage().unpublished == 0 or not kept
        assert store.sweep() == 0
        if kept:
            assert digest(store.load(KEY)) == digest(STATE)
        rests = not kept and names(store) != []
        a_day_passes(store)
        assert store.sweep() == rests
        assert len(names(store)) == (3 if kept else 0)
        assert list(store.keys()) == [KEY] * kept
    assert {(False, 0), (False, 1), (False, 2), (True, 3)} == outcomes


def test_the_rests_beside_a_checkpoint_are_swept_and_the_checkpoint_is_spared(store: UrlCheckpoints) -> None:
    manifest = saved(store)["manifest"]
    content = memory.cat_file(manifest)
    memory.rm_file(manifest)
    saved(store)
    assert len(names(store)) == 5
    assert store.sweep() == 0
    a_day_passes(store)
    assert store.sweep() == 1
    assert digest(store.load(KEY)) == digest(STATE)
    assert content != memory.cat_file(manifest)
    assert len(names(store)) == 3


def test_beside_a_spoilt_manifest_nothing_is_swept(store: UrlCheckpoints) -> None:
    manifest = saved(store)["manifest"]
    memory.rm_file(manifest)
    memory.pipe_file(saved(store)["manifest"], b"damaged")
    a_day_passes(store)
    assert store.sweep() == 0
    assert len(names(store)) == 5
    store.delete(KEY)
    assert store.sweep() == 2
    assert names(store) == []


def test_the_second_writer_of_a_key_changes_nothing_and_leaves_nothing(
    place: str, store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    winner = {"a": 1}
    before_the_manifest(monkeypatch, lambda: UrlCheckpoints(place, "workload").save(KEY, winner, step=1, parent=None))
    kept = store.save(KEY, {"a": 2}, step=1, parent=None)
    assert kept.digest == digest(winner)
    assert store.load(KEY) == winner
    assert len(names(store)) == 3


@pytest.mark.parametrize("action", ["sweep", "delete", "load", "usage"])
def test_a_living_writer_is_not_disturbed(
    place: str, store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    other = UrlCheckpoints(place, "workload")

    def disturb() -> None:
        with suppress(CheckpointMissing):
            {
                "sweep": other.sweep,
                "delete": lambda: other.delete(KEY),
                "load": lambda: other.load(KEY),
                "usage": other.usage,
            }[action]()

    before_the_manifest(monkeypatch, disturb)
    saved(store)
    assert digest(store.load(KEY)) == digest(STATE)


def test_a_writer_who_stopped_for_a_night_writes_its_files_again(
    store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights = itertools.chain([0.0, 13 * 3600.0], itertools.repeat(13 * 3600.0))
    written = []
    # This module's clock only: other threads of the process look at the time as well.
    monkeypatch.setattr(url, "time", SimpleNamespace(time=lambda: next(nights), sleep=time.sleep))
    wrap(monkeypatch, "open", lambda call, path, **_: (written.append(path), call())[1])
    saved(store)
    assert sum(path.endswith(".safetensors") for path in written) == 2
    assert digest(store.load(KEY)) == digest(STATE)
    assert len(names(store)) == 3


def test_a_clock_of_this_host_that_is_a_year_ahead_sweeps_no_living_writer(
    store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.rm_file(saved(store)["manifest"])
    monkeypatch.setattr(url, "time", SimpleNamespace(time=lambda: 4e9, sleep=time.sleep))
    assert store.sweep() == 0
    assert len(names(store)) == 2


def test_a_manifest_that_is_seen_half_written_is_read_again(
    store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(store)["manifest"]
    whole = memory.cat_file(path)
    seen = iter([b"", whole[:50], whole])
    wrap(monkeypatch, "cat_file", lambda call, at, **_: next(seen) if at.endswith(".json") and at == path else call())
    assert store.manifest(KEY).key == KEY


def test_a_server_without_conditional_writes_still_keeps_the_first_checkpoint(
    place: str, store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def around(call: Callable[[], Any], path: str, **options: Any) -> Any:
        if options.get("mode") == "create":
            raise OSError(errno.ENOSYS, "A header you provided implies functionality that is not implemented")
        return call()

    wrap(monkeypatch, "pipe_file", around)
    first = store.save(KEY, {"a": 1}, step=1, parent=None)
    assert store.save(KEY, {"a": 2}, step=1, parent=None) == first
    assert store.load(KEY) == {"a": 1}
    with pytest.raises(FileExistsError):
        store._place(KEY).write_new(files.MANIFEST, b"other")
    assert len(names(store)) == 3


# --- connections and refusals -----------------------------------------------------------------------------


class Flaky:
    """Fails each request of the driver so many times before it lets it pass."""

    def __init__(self, patch: pytest.MonkeyPatch, error: Exception, times: int) -> None:
        self.failed: dict[tuple[str, str], int] = {}
        for method in ("pipe_file", "open", "rm_file", "cat_file", "info", "find"):

            def around(call: Callable[[], Any], path: str, method: str = method, **_: Any) -> Any:
                at = (method, path)
                if self.failed.setdefault(at, 0) < times:
                    self.failed[at] += 1
                    raise error
                return call()

            wrap(patch, method, around)


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), TimeoutError(), RuntimeError("a driver's own")])
@pytest.mark.usefixtures("no_pauses")
def test_a_connection_that_is_lost_now_and_then_is_ridden_out(
    store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    flaky = Flaky(monkeypatch, error, times=1)
    store.save(KEY, STATE, step=7, parent=None)
    assert digest(store.load(KEY)) == digest(STATE)
    assert list(store.keys()) == [KEY]
    store.delete(KEY)
    assert names(store) == []
    assert len(flaky.failed) > 5


@pytest.mark.usefixtures("no_pauses")
def test_a_connection_that_stays_lost_is_given_up_with_the_remedy(
    store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(store, OTHER)
    flaky = Flaky(monkeypatch, ConnectionResetError(errno.ECONNRESET, "reset by peer"), times=1000)
    for call in (
        lambda: store.save(KEY, STATE, step=7, parent=None),
        lambda: store.load(OTHER),
        lambda: store.delete(OTHER),
        lambda: list(store.keys()),
        store.usage,
        store.sweep,
        store.check,
    ):
        with pytest.raises(CheckpointError, match=rf"under {store.url}: reset by peer; .*can be reached"):
            call()
    assert max(flaky.failed.values()) <= 30


@pytest.mark.usefixtures("no_pauses")
def test_a_manifest_whose_answer_was_lost_is_taken_for_written(
    store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = [True]

    def around(call: Callable[[], Any], path: str, **options: Any) -> Any:
        done = call()
        if options.get("mode") == "create" and lost:
            lost.pop()
            raise ConnectionResetError("reset")
        return done

    wrap(monkeypatch, "pipe_file", around)
    kept = store.save(KEY, STATE, step=7, parent=None)
    assert kept.digest == digest(STATE) == digest(store.load(KEY))
    assert len(names(store)) == 3


@pytest.mark.usefixtures("no_pauses")
def test_where_it_is_unclear_whether_the_manifest_was_written_its_files_stay(store: UrlCheckpoints) -> None:
    down = False

    def around(call: Callable[[], Any], path: str, **options: Any) -> Any:
        nonlocal down
        done = None if down else call()
        down = down or options.get("mode") == "create"
        if down:
            raise ConnectionResetError("reset")
        return done

    with pytest.MonkeyPatch.context() as patch:
        for method in ("pipe_file", "cat_file"):
            wrap(patch, method, around)
        with pytest.raises(CheckpointError, match="can be reached"):
            store.save(KEY, STATE, step=7, parent=None)
    assert digest(store.load(KEY)) == digest(STATE)


def test_a_refusal_is_not_tried_again_and_leaves_nothing(
    store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def around(call: Callable[[], Any], path: str, **options: Any) -> Any:
        tried.append(path)
        if path.endswith("manifest.json"):
            raise PermissionError("Access Denied")
        return call()

    wrap(monkeypatch, "pipe_file", around)
    with pytest.raises(CheckpointError, match=r"Access Denied; see that the credentials are right"):
        store.save(KEY, STATE, step=7, parent=None)
    assert len([path for path in tried if path.endswith("manifest.json")]) == 1
    assert names(store) == []


def test_a_full_disk_is_named_with_the_remedy_and_nothing_is_left(
    tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    store = UrlCheckpoints(f"file://{tmp_path}", "workload")
    with full_disk(50_000), pytest.raises(CheckpointError, match=rf"{KEY} under .*free space"):
        store.save(KEY, {"w": torch.zeros(100_000)}, step=0, parent=None)
    assert names(store) == []


def test_a_place_that_may_not_be_written_to_is_named(
    open_folder: Path, unprivileged: Callable[[], AbstractContextManager[None]]
) -> None:
    open_folder.chmod(0o555)
    store = UrlCheckpoints(f"file://{open_folder}", "workload")
    for call in (store.check, lambda: store.save(KEY, STATE, step=0, parent=None)):
        with unprivileged(), pytest.raises(CheckpointError, match=rf"{open_folder}: Permission denied.*credentials"):
            call()
    open_folder.chmod(0o755)
    assert os.listdir(open_folder) == []


def test_folders_above_the_url_are_not_made(tmp_path: Path) -> None:
    store = UrlCheckpoints(f"file://{tmp_path}/mistyped/checkpoints", "workload")
    for call in (store.check, lambda: store.save(KEY, STATE, step=0, parent=None)):
        with pytest.raises(CheckpointError, match="bucket or folder of the URL is there"):
            call()
    assert list(store.keys()) == []
    assert os.listdir(tmp_path) == []


# --- large states -----------------------------------------------------------------------------------------


def test_files_of_many_pieces_come_back(store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PIECE", 1000)
    monkeypatch.setattr(remote, "_BATCH", 3500)
    state = {f"t{n}": torch.randn(n * 37 % 1500) for n in range(40)} | {"raw": os.urandom(10_000), "none": b""}
    kept = store.save(KEY, state, step=0, parent=None)
    assert digest(store.load(KEY)) == digest(state) == kept.digest
    path = paths(store)["tensors"]
    memory.pipe_file(path, memory.cat_file(path)[:-1] + b"\x00")
    with pytest.raises(CheckpointCorrupt):
        store.load(KEY)


# --- secrets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "denied for AKIA0123 with hunter-2-hunter",
        "GET https://host/bucket/key?X-Amz-Signature=abcdef&sig=hunter-2-hunter refused",
        "cannot reach https://AKIA0123:hunter-2-hunter@host/bucket",
    ],
)
def test_credentials_are_never_in_a_message_or_its_causes(
    place: str, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    options = {"key": "AKIA0123", "client_kwargs": {"endpoint_url": "https://AKIA0123:hunter-2-hunter@host"}}
    store = UrlCheckpoints(
        f"{place}/x", "workload", storage_options={**options, "nested": {"secret": "hunter-2-hunter"}}
    )

    def around(call: Callable[[], Any], path: str, **options: Any) -> Any:
        try:
            raise ValueError(text)
        except ValueError as error:
            raise PermissionError(text) from error

    wrap(monkeypatch, "cat_file", around)
    with pytest.raises(CheckpointError) as caught:
        store.load(KEY)
    shown = "".join(traceback.format_exception(caught.value)) + repr(store) + str(caught.value)
    for secret in ("AKIA0123", "hunter", "abcdef"):
        assert secret not in shown
    assert "refused" in shown or "denied" in shown or "cannot reach" in shown


def test_a_url_is_shown_without_user_and_password() -> None:
    shown = remote._without_secrets("cannot reach sftp://ann:hunter2@host:22/folder?token=1 at all")
    assert shown == "cannot reach sftp://host:22/folder at all"


def test_a_harmless_cause_is_shown(store: UrlCheckpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    error = PermissionError("Access Denied")
    wrap(monkeypatch, "cat_file", lambda call, path, **_: raise_it(error))
    with pytest.raises(CheckpointError) as caught:
        store.load(KEY)
    assert caught.value.__cause__ is error


def raise_it(error: Exception) -> None:
    raise error


# --- locations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}", "local://{}", "FILE://{}"])
def test_a_path_is_a_folder(tmp_path: Path, form: str) -> None:
    opened = open_checkpoints(form.format(tmp_path / "a"), "workload")
    assert isinstance(opened, FolderCheckpoints)
    assert opened.path == tmp_path / "a"


def test_paths_and_their_urls_are_one_folder(tmp_path: Path) -> None:
    path = tmp_path / "50% of é"
    for location in (path, str(path), path.as_uri()):
        opened = open_checkpoints(location, "workload")
        assert isinstance(opened, FolderCheckpoints) and opened.path == path


def test_any_other_scheme_goes_through_fsspec(place: str) -> None:
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
    ],
)
def test_a_location_that_cannot_be_is_refused(location: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_checkpoints(location, "workload")


def test_options_for_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no storage_options"):
        open_checkpoints(tmp_path, "workload", storage_options={"key": "a"})


def test_a_driver_that_is_not_installed_is_named_with_the_command_that_installs_it() -> None:
    script = (
        "import sys; sys.modules['s3fs'] = None\n"
        "from hpstage.checkpoints import open_checkpoints\n"
        "from hpstage.errors import UsageError\n"
        "try: open_checkpoints('s3://user:hunter2@bucket/prefix', 'w')\n"
        "except UsageError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "the driver of s3:// is not installed" in done.stdout, done.stderr
    assert "pip install s3fs" in done.stdout
    assert "hunter2" not in done.stdout


def test_fsspec_is_loaded_when_a_url_is_opened_and_not_before() -> None:
    script = (
        "import sys, hpstage.checkpoints as c\n"
        "c.open_checkpoints('.', 'w')\n"
        "assert not {'fsspec', 'torch', 'numpy', 'asyncio'} & set(sys.modules)\n"
        "c.open_checkpoints('memory://x', 'w')\n"
        "assert 'fsspec' in sys.modules and not {'torch', 'numpy', 's3fs'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


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


# --- a server of S3 ---------------------------------------------------------------------------------------

needs_s3 = pytest.mark.skipif(
    importlib.util.find_spec("s3fs") is None
    or importlib.util.find_spec("moto") is None
    or importlib.util.find_spec("flask") is None,
    reason="needs the packages s3fs and moto[server] for a server of S3",
)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@contextmanager
def s3_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of a server of S3 in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert server.poll() is None
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", server
    finally:
        server.kill()
        server.wait()


def s3_options(address: str) -> dict[str, Any]:
    return {"key": "AKIA0123", "secret": "hunter-2-hunter", "endpoint_url": address}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as (address, _):
        fsspec.filesystem("s3", **s3_options(address)).mkdir("bucket")
        yield address


@needs_s3
class TestOnS3(CheckpointContract):
    rounds = 25

    @pytest.fixture
    def open_store(self, s3: str) -> Callable[[], CheckpointStore]:
        place = f"s3://bucket/{uuid.uuid4().hex}/deep"
        return functools.partial(UrlCheckpoints, place, "workload", storage_options=s3_options(s3))


@needs_s3
def test_a_bucket_that_is_not_there_is_named_and_not_made(s3: str) -> None:
    store = UrlCheckpoints("s3://mistyped/prefix", "workload", storage_options=s3_options(s3))
    for call in (store.check, lambda: store.save(KEY, STATE, step=0, parent=None)):
        with pytest.raises(CheckpointError, match=r"s3://mistyped/prefix: .*does not exist; see that the bucket"):
            call()
    assert list(store.keys()) == []
    with pytest.raises(CheckpointMissing):
        store.load(KEY)
    assert not fsspec.filesystem("s3", **s3_options(s3)).exists("mistyped")


S3_KILLED = """
import json, os, signal, sys, torch
from hpstage.checkpoints import UrlCheckpoints, format
format.encode_manifest = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
store = UrlCheckpoints(sys.argv[1], "workload", storage_options=json.loads(sys.argv[2]))
store.save("k" * 32, {"w": torch.zeros(10)}, step=0, parent=None)
"""


@needs_s3
def test_what_a_killed_writer_left_on_s3_is_no_checkpoint_and_is_swept(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = StateKey("k" * 32)
    place, options = f"s3://bucket/{uuid.uuid4().hex}", s3_options(s3)
    store = UrlCheckpoints(place, "workload", storage_options=options)
    done = subprocess.run([sys.executable, "-c", S3_KILLED, place, json.dumps(options)])
    assert done.returncode == -9
    assert len(names(store)) == 2
    assert list(store.keys()) == []
    assert store.sweep() == 0
    store.save(key, {"w": torch.zeros(10)}, step=0, parent=None)
    assert len(names(store)) == 5
    monkeypatch.setattr(url, "_ABANDONED", -10.0)
    assert store.sweep() == 1
    assert len(names(store)) == 3
    assert digest(store.load(key)) == digest({"w": torch.zeros(10)})


@needs_s3
@pytest.mark.parametrize("size", [10, 60 << 20])
def test_an_upload_that_fails_half_way_is_no_object_and_holds_no_parts(s3: str, size: int) -> None:
    store = UrlCheckpoints(f"s3://bucket/{uuid.uuid4().hex}", "workload", storage_options=s3_options(s3))
    with suppress(Dying), store._place(KEY).create("state.safetensors") as file:
        file.write(bytes(size))
        raise Dying
    assert names(store) == []
    service = fsspec.filesystem("s3", **s3_options(s3))
    assert service.list_multipart_uploads("bucket") == []


@needs_s3
def test_a_truncated_object_is_noticed(s3: str) -> None:
    store = UrlCheckpoints(f"s3://bucket/{uuid.uuid4().hex}", "workload", storage_options=s3_options(s3))
    store.save(KEY, STATE, step=0, parent=None)
    service = fsspec.filesystem("s3", **s3_options(s3))
    for name in names(store):
        path = f"{store.url.removeprefix('s3://')}/{name}"
        content = service.cat_file(path)
        for spoilt in (content[:-1], content[: len(content) // 2], b""):
            service.pipe_file(path, spoilt)
            with pytest.raises(CheckpointCorrupt, match=KEY):
                store.load(KEY)
        service.pipe_file(path, content)
    assert digest(store.load(KEY)) == digest(STATE)


@needs_s3
def test_a_store_used_before_a_fork_can_be_used_after_it(s3: str) -> None:
    script = (
        "import json, os, sys\n"
        "from hpstage.checkpoints import UrlCheckpoints\n"
        "store = UrlCheckpoints(sys.argv[1], 'w', storage_options=json.loads(sys.argv[2]))\n"
        "store.save('parent', [1], step=0, parent=None)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    store.save('child', store.load('parent'), step=0, parent=None)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert store.load('child') == [1]"
    )
    command = [sys.executable, "-c", script, f"s3://bucket/{uuid.uuid4().hex}", json.dumps(s3_options(s3))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@needs_s3
@pytest.mark.parametrize(
    "driver_options",
    [
        {"config_kwargs": {"retries": {"total_max_attempts": 1}}},
        pytest.param({}, marks=pytest.mark.slow),  # s3fs and botocore retry too, each on its own
    ],
)
def test_a_server_that_dies_is_an_error_in_bounded_time_without_credentials(driver_options: dict[str, Any]) -> None:
    with s3_server() as (address, server):
        fsspec.filesystem("s3", **s3_options(address)).mkdir("bucket")
        store = UrlCheckpoints("s3://bucket", "workload", storage_options={**s3_options(address), **driver_options})
        store.save(KEY, STATE, step=0, parent=None)
        server.kill()
        server.wait()
        began = time.monotonic()
        for call in (lambda: store.load(KEY), lambda: store.save(OTHER, STATE, step=0, parent=None)):
            with pytest.raises(CheckpointError, match=r"s3://bucket: .*can be reached") as caught:
                call()
            assert "hunter" not in "".join(traceback.format_exception(caught.value))
        assert time.monotonic() - began < 120


@needs_s3
@pytest.mark.slow
def test_a_state_of_many_parts_comes_back_from_s3(s3: str) -> None:
    store = UrlCheckpoints(f"s3://bucket/{uuid.uuid4().hex}", "workload", storage_options=s3_options(s3))
    state = {f"layer{number}": torch.randn(1_000_000) for number in range(40)}  # 160 MB: four parts
    kept = store.save(KEY, state, step=0, parent=None)
    assert digest(store.load(KEY)) == digest(state) == kept.digest
