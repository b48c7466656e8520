"""A snapshot in a file: replaced as a whole, by one process at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class SnapshotFile:
    """The snapshot at ``path``, for all threads and processes of one host."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_name(f"{path.name}-part")

    def write(self, content: bytes) -> None:
        """Replace the snapshot, unless another process does so at this moment."""
        # The lock goes with its process, so that what a dead writer has left is written over by the next.
        with open(self._part, "ab") as part:
            try:
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(part.fileno()), os.stat(self._part)):
                    return  # another has just put it in place
            except (BlockingIOError, FileNotFoundError):
                return
            try:
                part.truncate(0)
                part.write(content)
                part.flush()
                os.replace(self._part, self.path)
            except BaseException:
                os.unlink(self._part)
                raise

    def read(self) -> bytes | None:
        """Return the snapshot; ``None`` if there is none."""
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return None
