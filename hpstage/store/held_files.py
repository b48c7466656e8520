"""HeldFiles: whether the files of a SQLite database are still those that were opened.

SQLite continues with files that were moved, deleted or overwritten, and all that is recorded then is lost.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from hpstage.errors import StoreError

GENERATION = "CREATE TABLE generation (id TEXT NOT NULL)"
"""A table of one row, which is written when the file is created and never changed. Files of earlier versions lack it.
"""

# Seconds between two attempts to read a file that is being written, and the number of attempts.
_PAUSE = 0.05
_LOOKS = 40


class HeldFiles:
    """The database ``path`` and its two auxiliary files, which exist as long as a connection to it is open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = [path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))]
        self._numbers = [_number(file) for file in self._files]
        self._generation = self._read_generation()
        self._size = self._written = 0
        self._overwritten = False

    def check(self) -> None:
        """Raise :class:`StoreError` if records written now would be lost. The caller holds the write lock."""
        for file, number in zip(self._files, self._numbers, strict=True):
            found = _number(file)
            if found != number:
                raise self._error(file, "moved or deleted" if found is None else "replaced by another file")
        there = self._path.stat()
        if there.st_mtime_ns != self._written:
            # Records were moved there from the write-ahead log, or another program has overwritten it.
            self._overwritten |= there.st_size < self._size or not self._is_same()
            self._size, self._written = there.st_size, there.st_mtime_ns
        if self._overwritten:
            raise self._error(self._path, "written over by another program")

    def _is_same(self) -> bool:
        if self._generation is None:
            return True
        for _ in range(_LOOKS):  # another process may be moving records: its file is not yet a database
            if self._read_generation() == self._generation:
                return True
            time.sleep(_PAUSE)
        return False

    def _read_generation(self) -> str | None:
        """Return the generation in the database itself, not in its write-ahead log. It is read through SQLite, since
        opening and closing the file in another way would release the locks of this process."""
        try:
            connection = sqlite3.connect(f"{self._path.as_uri()}?mode=ro&immutable=1", uri=True)
            try:
                # As long as somebody reads, the last pages may be only in the write-ahead log. The database is then
                # shorter than its header states, which SQLite refuses otherwise; the pages read here never change.
                connection.execute("PRAGMA writable_schema = ON")
                found = connection.execute("SELECT id FROM generation").fetchone()
            finally:
                connection.close()
        except sqlite3.DatabaseError:
            return None
        return None if found is None else str(found[0])

    def _error(self, file: Path, how: str) -> StoreError:
        return StoreError(
            f"{file} was {how} while it was in use: nothing more can be recorded in it. If you have all files that "
            f"were in {self._path.parent}, put them back and run the same command again; what they hold is kept. Else "
            f"choose another store"
        )


def _number(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
