"""Gives a fork its own copy of the memory that its parent has mapped as shared, and that both would write to.

Such memory belongs to tensors after ``share_memory_()``, to multiprocessing's arrays and values, to ``mmap``, and to
files that NumPy maps. A fork that trains would change the data that its parent trains on. The fork's copy has the same
content at the same addresses, and is shared with the processes that the fork starts, so data loaders work as before.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import stat
from collections import defaultdict
from typing import NamedTuple

from hpstage.checkpoints.host_memory import HostMemory
from hpstage.errors.text import size

_MOST = 2 << 30
"""Maximum bytes to copy, since training waits for the copy."""
_SHARED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (...s) ([0-9a-f]+) (\S+) (\d+) *(.*)$", re.MULTILINE)
"""A line of ``/proc/self/maps``: begin, end, rights, offset in the file, device, inode and path."""
_RIGHTS = {"r": mmap.PROT_READ, "w": mmap.PROT_WRITE, "x": mmap.PROT_EXEC}
_MAP_FIXED = 0x10  # from linux/mman.h
_FAILED = ctypes.c_void_p(-1).value


class SharedMapping(NamedTuple):
    """A range of addresses, and the file and offset of its content; memory without a file has one in the kernel."""

    begin: int
    end: int
    rights: str
    offset: int
    file: tuple[bytes, ...]


def shared_mappings() -> list[SharedMapping]:
    """Return the shared mappings that this process can write to, and all others of the same files.

    Devices and queues of the kernel are left out: they have no content that could be copied.
    """
    with open("/proc/self/maps", "rb") as maps:
        lines = _SHARED.findall(maps.read())
    writable = {_file(line) for line in lines if b"w" in line[2] and _has_content(line[-1])}
    return [
        SharedMapping(int(begin, 16), int(end, 16), rights.decode(), int(offset, 16), file)
        for line in lines
        if (file := _file(line)) in writable
        for begin, end, rights, offset, *_ in [line]
    ]


def obstacle_in(mappings: list[SharedMapping]) -> str:
    """Return the reason why a fork cannot copy these mappings, or an empty string."""
    nbytes = sum(mapping.end - mapping.begin for mapping in mappings)
    if nbytes > _MOST:
        return f"it has {size(nbytes)} of shared memory, more than the {size(_MOST)} that are copied at most"
    if not HostMemory().has_room(nbytes):
        return f"memory has no room for a copy of its {size(nbytes)} of shared memory"
    return ""


def make_own(mappings: list[SharedMapping]) -> None:
    """Replace memory that this process shares with others by its own memory with the same content.

    Raises:
        OSError: there is not enough memory.
    """
    by_file: dict[tuple[bytes, ...], list[SharedMapping]] = defaultdict(list)
    for mapping in mappings:
        by_file[mapping.file].append(mapping)
    for of_one in by_file.values():  # one copy per file: mappings of the same file continue to share their content
        own = os.memfd_create("hpstage-fork")
        try:
            os.ftruncate(own, max(mapping.offset + mapping.end - mapping.begin for mapping in of_one))
            for mapping in of_one:
                _copy(mapping, own)
            for mapping in of_one:
                _map(mapping, own)
        finally:
            os.close(own)


def _file(line: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return an identifier of a file. Segments of System V have their own inode numbers, on the device of other
    memory."""
    *_, device, inode, path = line
    return device, inode, path[:5] if path.startswith(b"/SYSV") else b""


def _has_content(path: bytes) -> bool:
    """Whether the mapping is a file or memory, and not a device (such as a GPU) or a queue (such as io_uring's)."""
    if path.startswith((b"/dev/zero", b"[anon_shmem:")):  # memory without a file, under the names that Linux gives it
        return True
    if not path.startswith(b"/"):
        return False
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:  # deleted, as most shared memory is
        return path.startswith(b"/dev/shm/") or not path.startswith(b"/dev/")


def _copy(mapping: SharedMapping, file: int) -> None:
    """Write the content of a mapping to its offset in a file. The kernel reads it, since it reports an error where the
    mapped file was truncated; reading there in this process would end it."""
    content = memoryview((ctypes.c_char * (mapping.end - mapping.begin)).from_address(mapping.begin))
    place = mapping.offset
    while content:
        try:
            written = os.pwrite(file, content, place)
        except OSError as error:
            if error.errno == errno.EFAULT:
                return
            raise
        content, place = content[written:], place + written


def _map(mapping: SharedMapping, file: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (*(ctypes.c_void_p, ctypes.c_size_t), *[ctypes.c_int] * 3, ctypes.c_long)
    rights = sum(right for letter, right in _RIGHTS.items() if letter in mapping.rights)
    length = mapping.end - mapping.begin
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if libc.mmap(mapping.begin, length, rights, flags, file, mapping.offset) == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
