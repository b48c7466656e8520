"""A fork has its own copy of memory that processes share: its parent sees nothing that it writes."""

from __future__ import annotations

import mmap
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpstage.execution import fork, shared_mappings
from hpstage.execution.fork import Fork, forked

pytestmark = [pytest.mark.forks, pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has these")]


def in_a_fork(work: Callable[[], bytes]) -> bytes:
    made = Fork(work)
    try:
        answer = made.wait(60)
        assert answer is not None
        return answer
    finally:
        made.close(kill=True)


def without_a_file(_: Path) -> Any:
    return mmap.mmap(-1, 3 * mmap.PAGESIZE)


def of_multiprocessing(_: Path) -> Any:
    return memoryview(multiprocessing.RawArray("B", 3 * mmap.PAGESIZE)).cast("B")


def of_a_tensor(_: Path) -> Any:
    torch = pytest.importorskip("torch")
    return torch.zeros(3 * mmap.PAGESIZE, dtype=torch.uint8).share_memory_().numpy()


def of_a_mapped_file(folder: Path) -> Any:
    return np.memmap(folder / "mapped", np.uint8, "w+", shape=(2 * mmap.PAGESIZE + 5,))


@pytest.mark.parametrize("made", [without_a_file, of_multiprocessing, of_a_tensor, of_a_mapped_file])
def test_writes_of_a_forked_process_to_shared_memory_do_not_reach_its_parent(
    made: Callable[[Path], Any], tmp_path: Path
) -> None:
    shared = made(tmp_path)
    shared[0], shared[-1] = 1, 2

    def work() -> bytes:
        found = bytes((shared[0], shared[1], shared[-1]))
        shared[0], shared[-1] = 7, 8
        return found + bytes((shared[0], shared[-1]))

    assert in_a_fork(work) == bytes((1, 0, 2, 7, 8))
    assert (shared[0], shared[-1]) == (1, 2)


def test_a_forked_process_sees_shared_memory_as_it_was_at_the_fork() -> None:
    """This holds even if it reads much later."""
    shared = mmap.mmap(-1, 8)
    shared[0] = 1
    waits, goes = os.pipe()
    made = Fork(lambda: bytes((os.read(waits, 1)[0], shared[0])))
    shared[0] = 2
    os.write(goes, b"\x05")
    assert made.wait(60) == bytes((5, 1))
    made.close()
    os.close(waits)
    os.close(goes)


def test_two_mappings_of_the_same_memory_still_share_it_in_a_forked_process() -> None:
    first = shared_memory.SharedMemory(create=True, size=16)
    second = shared_memory.SharedMemory(first.name)
    assert first.buf is not None
    assert second.buf is not None

    def work() -> bytes:
        assert first.buf is not None
        assert second.buf is not None
        first.buf[3] = 9
        return bytes((second.buf[3],))

    try:
        assert in_a_fork(work) == b"\x09"
        assert (first.buf[3], second.buf[3]) == (0, 0)
    finally:
        second.close()
        first.close()
        first.unlink()


def test_a_child_of_a_forked_process_shares_memory_with_that_process_only() -> None:
    shared = mmap.mmap(-1, 8)

    def write() -> None:
        shared[0] = 3

    def work() -> bytes:
        child = multiprocessing.get_context("fork").Process(target=write)
        child.start()
        child.join()
        return bytes((shared[0],))

    assert in_a_fork(work) == b"\x03"
    assert shared[0] == 0


def test_a_forked_process_has_the_remaining_pages_of_a_truncated_mapped_file(tmp_path: Path) -> None:
    shared = np.memmap(tmp_path / "mapped", np.uint8, "w+", shape=(2 * mmap.PAGESIZE,))
    shared[0] = 3
    os.truncate(tmp_path / "mapped", mmap.PAGESIZE)

    def work() -> bytes:
        shared[0] += 1
        return bytes(shared[:1])

    assert in_a_fork(work) == b"\x04"
    assert shared[0] == 3


def test_a_fork_with_too_much_shared_memory_to_copy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on copies is exceeded, so the fork does nothing."""
    done = tmp_path / "done"
    shared = np.memmap(tmp_path / "mapped", np.uint8, "w+", shape=(2 * mmap.PAGESIZE,))
    monkeypatch.setattr(shared_mappings, "_MOST", mmap.PAGESIZE)
    with pytest.raises(OSError, match=r"it has [\d.]+ kB of shared memory, more than the 4.1 kB that are copied"):
        forked(done.touch, -1)
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="shared memory"):
        Fork(shared.tobytes)
    assert os.listdir("/proc/self/fd") == descriptors
    assert not done.exists()


def test_a_fork_raises_if_copying_shared_memory_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = mmap.mmap(-1, 8)
    waits, goes = os.pipe()
    monkeypatch.setattr(fork, "_PATIENCE", 0.05)
    monkeypatch.setattr(fork, "make_own", lambda _: os.read(waits, 1))
    with pytest.raises(OSError, match="takes too long"):
        forked(shared.flush, -1)
    os.close(waits)
    os.close(goes)


def test_mappings_of_devices_and_kernel_queues_have_no_content_to_copy() -> None:
    assert not shared_mappings._has_content(b"/dev/null")
    assert not shared_mappings._has_content(b"/dev/nvidia0-that-is-not-here")
    assert not shared_mappings._has_content(b"anon_inode:[io_uring]")
    assert not shared_mappings._has_content(b"[vvar]")
    assert shared_mappings._has_content(b"/dev/shm/psm_1 (deleted)")
