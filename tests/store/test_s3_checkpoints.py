"""UrlCheckpoints on a server of S3."""

from __future__ import annotations

import functools
import importlib.util
import json
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import fsspec
import pytest
import torch

from hpstage.checkpoints import CheckpointStore, UrlCheckpoints, url
from hpstage.checkpoints.state_tree import digest
from hpstage.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing
from hpstage.plan.facts import StateKey
from hpstage.testing import CheckpointContract
from tests.store.url_checkpoints import KEY, OTHER, STATE, Dying, names

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
@pytest.mark.parametrize("url", ["s3://mistyped/prefix", "s3://mistyped", "s3://mistyped/"])
def test_a_missing_s3_bucket_is_named_in_the_error_and_not_created(url: str, s3: str) -> None:
    store = UrlCheckpoints(url, "workload", storage_options=s3_options(s3))
    for call in (store.check, lambda: store.save(KEY, STATE, step=0, parent=None)):
        with pytest.raises(CheckpointError, match=rf"{url.rstrip('/')}.*: .*does not exist; see that the bucket"):
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
def test_objects_of_a_killed_writer_on_s3_are_not_listed_as_a_checkpoint_and_are_swept(
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
def test_a_failed_s3_upload_leaves_no_object_and_no_multipart_upload(s3: str, size: int) -> None:
    store = UrlCheckpoints(f"s3://bucket/{uuid.uuid4().hex}", "workload", storage_options=s3_options(s3))
    with suppress(Dying), store._place(KEY).create("state.safetensors") as file:
        file.write(bytes(size))
        raise Dying
    assert names(store) == []
    service = fsspec.filesystem("s3", **s3_options(s3))
    assert service.list_multipart_uploads("bucket") == []


@needs_s3
def test_a_truncated_s3_object_is_detected_on_load(s3: str) -> None:
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
def test_s3_checkpoints_can_be_used_before_and_after_a_fork_of_the_process(s3: str) -> None:
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@needs_s3
@pytest.mark.parametrize(
    "driver_options",
    [
        {"config_kwargs": {"retries": {"total_max_attempts": 1}}},
        pytest.param({}, marks=pytest.mark.slow),  # s3fs and botocore retry too, each on its own
    ],
)
def test_the_error_for_a_dead_s3_server_shows_no_credentials(driver_options: dict[str, Any]) -> None:
    with s3_server() as (address, server):
        fsspec.filesystem("s3", **s3_options(address)).mkdir("bucket")
        store = UrlCheckpoints("s3://bucket", "workload", storage_options={**s3_options(address), **driver_options})
        store.save(KEY, STATE, step=0, parent=None)
        server.kill()
        server.wait()
        for call in (lambda: store.load(KEY), lambda: store.save(OTHER, STATE, step=0, parent=None)):
            with pytest.raises(CheckpointError, match=r"s3://bucket: .*can be reached") as caught:
                call()
            assert "hunter" not in "".join(traceback.format_exception(caught.value))


@needs_s3
@pytest.mark.slow
def test_a_state_uploaded_to_s3_in_several_parts_is_loaded_as_saved(s3: str) -> None:
    store = UrlCheckpoints(f"s3://bucket/{uuid.uuid4().hex}", "workload", storage_options=s3_options(s3))
    state = {f"layer{number}": torch.randn(1_000_000) for number in range(40)}  # 160 MB: four parts
    kept = store.save(KEY, state, step=0, parent=None)
    assert digest(store.load(KEY)) == digest(state) == kept.digest
