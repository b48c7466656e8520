"""Shared memory: processes of a gang read in place what another one on their host has written."""

from __future__ import annotations

import json
import mmap
import os
import secrets
from contextlib import suppress
from itertools import count

import torch

_TOKEN = 16
"""Bytes by which a reader sees that it has found the memory it looked for: process ids of containers repeat."""
_SERIALS = count(1)


class Memory:
    """Bytes of this process, which grow. They vanish with the last process that has them, however it ends.

    Attributes:
        fd: its file, by which others of the host can map it; -1 if they cannot.
        serial: another one each time the file is another one.
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
        with suppress(OSError, AttributeError):  # no memory is left for files, or the system has none of this kind
            fd = os.memfd_create("hpstage-gang")
            try:
                # All of it now: writing to what is not there would end the process.
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
        """Return where another process can find this memory, and what it reads there."""
        token = secrets.token_bytes(_TOKEN)
        self.take(_TOKEN).copy_(torch.frombuffer(bytearray(token), dtype=torch.uint8))
        return json.dumps([os.getpid(), self.fd, token.hex()])


class Reader:
    """Another process's memory, as this one reads it."""

    def __init__(self, signature: str) -> None:
        self._pid, self._fd, self._token = json.loads(signature)
        self._mapped: dict[int, torch.Tensor] = {}

    def can_read(self) -> bool:
        """Whether the memory can be read here, as it was signed."""
        try:
            return self._fd >= 0 and bytes(self._map(self._fd)[:_TOKEN].numpy()) == bytes.fromhex(self._token)
        except (OSError, ValueError):
            return False

    def read(self, fd: int, serial: int, size: int) -> torch.Tensor:
        """Return the first ``size`` bytes of a memory of that process, where they are."""
        if serial not in self._mapped:
            if len(self._mapped) > 1:
                del self._mapped[min(self._mapped)]
            self._mapped[serial] = self._map(fd)
        return self._mapped[serial][:size]

    def _map(self, fd: int) -> torch.Tensor:
        # Writable, since torch has no tensors that are not; nobody writes.
        own = os.open(f"/proc/{self._pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return torch.frombuffer(mmap.mmap(own, os.fstat(own).st_size), dtype=torch.uint8)
        finally:
            os.close(own)
