"""MemoryJournal: a journal that lives and dies with its process."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hpstage.errors import StoreError
from hpstage.store.journal import Journal


class MemoryJournal(Journal):
    """A journal in the memory of this process, for all of its threads."""

    def __init__(self) -> None:
        self._records: list[bytes] = []
        self._requests: dict[str, int] = {}
        self._changed = threading.Condition()
        self._closed = False

    def append(self, records: Sequence[bytes], *, request: str | None = None, expect: int | None = None) -> int | None:
        with self._changed:
            self._check_open()
            if request is not None and request in self._requests:
                return self._requests[request]
            position = len(self._records)
            if expect is not None and expect != position:
                return None
            self._records.extend(records)
            if request is not None:
                self._requests[request] = position
            self._changed.notify_all()
            return position

    def read(self, start: int = 0, limit: int | None = None) -> list[bytes]:
        with self._changed:
            self._check_open()
            return self._records[start : None if limit is None else start + limit]

    def __len__(self) -> int:
        with self._changed:
            self._check_open()
            return len(self._records)

    def wait(self, length: int, timeout: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._records) > length, timeout)
            self._check_open()
            return len(self._records) > length

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the journal in memory is closed")
