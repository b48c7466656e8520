"""Disks that refuse: real limits on this process instead of mocked errors. URLs in the memory of this process."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from hpstage.checkpoints import UrlCheckpoints, remote, url
from tests.store.url_checkpoints import memory

_NOBODY = 65534


@contextmanager
def _no_file_larger_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """Within it, the kernel refuses to let a file grow beyond so many bytes, as a full disk would."""
    return _no_file_larger_than


@contextmanager
def _without_privileges() -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def unprivileged() -> Callable[[], AbstractContextManager[None]]:
    """Within it, permissions count, also when the tests run as root."""
    return _without_privileges


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A temporary folder that every user may enter (pytest's own may not be)."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


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
