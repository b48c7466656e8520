"""Shared memory: a process of a gang reads in place what another process on its host has written."""

from __future__ import annotations

import json
import mmap
import os
import secrets
from contextlib import suppress
from itertools import count

import torch

_TOKEN = 16
"""Number of random bytes that identify a memory to its reader. A process id is not enough, since other containers may
have the same one."""
_SERIALS = count(1)


class Memory:
    """Memory of this process that other processes can map; it grows. The system frees it with the last process that has
    mapped it, however that process ends.

    Attributes:
        fd: its file, which other processes on the host can map; -1 if they cannot.
        serial: a number that changes with the file.
    """

    def __init__(self) -> None:
        self.fd, self.serial = -1, 0
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """Return the first ``size`` bytes. What was written there may be lost."""
        if size > len(self._bytes):
            self._grow(max(size, 5 * len(self._bytes) // 4))
        return self._bytes[:size]

    def _grow(self, size: int) -> None:
        self.close()
        self.serial = next(_SERIALS)
        with suppress(OSError, AttributeError):  # no memory is left for files, or the system has no memfd
            fd = os.memfd_create("hpstage-gang")
            try:
                # All of it now: a write to memory that cannot be had would end the process.
                os.posix_fallocate(fd, 0, size)
                self._bytes, self.fd = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8), fd
                return
            except OSError:
                os.close(fd)
        self._bytes = torch.empty(size, dtype=torch.uint8)

    def close(self) -> None:
        """Close the file. Others keep what they have mapped. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd, self._bytes = -1, torch.empty(0, dtype=torch.uint8)

    def __del__(self) -> None:
        self.close()

    def sign(self) -> str:
        """Return a text by which another process can find this memory and check that it is this one."""
        token = secrets.token_bytes(_TOKEN)
        self.take(_TOKEN).copy_(torch.frombuffer(bytearray(token), dtype=torch.uint8))
        return json.dumps([os.getpid(), self.fd, token.hex()])


class Reader:
    """Another process's memory, as this one reads it."""

    def __init__(self, signature: str) -> None:
        self._pid, self._fd, self._token = json.loads(signature)
        self._mapped: dict[int, torch.Tensor] = {}

    def can_read(self) -> bool:
        """Return whether this process can read the memory, with the bytes that identify it."""
        try:
            return self._fd >= 0 and bytes(self._map(self._fd)[:_TOKEN].numpy()) == bytes.fromhex(self._token)
        except (OSError, ValueError):
            return False

    def read(self, fd: int, serial: int, size: int) -> torch.Tensor:
        """Return the first ``size`` bytes of a memory of that process, without a copy."""
        if serial not in self._mapped:
            if len(self._mapped) > 1:
                del self._mapped[min(self._mapped)]
            self._mapped[serial] = self._map(fd)
        return self._mapped[serial][:size]

    def _map(self, fd: int) -> torch.Tensor:
        # Writable, since torch has no read-only tensors; nobody writes.
        own = os.open(f"/proc/{self._pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return torch.frombuffer(mmap.mmap(own, os.fstat(own).st_size), dtype=torch.uint8)
        finally:
            os.close(own)
