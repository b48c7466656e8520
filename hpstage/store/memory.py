"""MemoryJournal: a store that exists as long as its process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpstage.errors import LeaseLost, StoreError
from hpstage.store.cursor import Cursor, chain
from hpstage.store.journal import NO_FENCES, Journal, Lease, check_seconds, history_changed


@dataclass(frozen=True, slots=True)
class _Held:
    owner: str
    token: int
    expires: float


class MemoryJournal(Journal):
    """A journal, leases and a snapshot in the memory of this process, for all of its threads.

    Args:
        clock: returns monotonic seconds; determines when leases expire.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._records: list[bytes] = []
        self._hashes: list[bytes] = [b""]  # at each position, the hash of the records before it
        self._leases: dict[str, _Held] = {}
        self._token = 0
        self._snapshot: bytes | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False

    def append(
        self, records: Sequence[bytes], *, expect: Cursor | None = None, fences: Mapping[str, int] = NO_FENCES
    ) -> int | None:
        with self._lock:
            self._check_open()
            if lost := self._not_held(fences):
                raise LeaseLost(lost)
            position = len(self._records)
            if expect is not None:
                self._check_history(expect)
                if expect.position != position:
                    return None
            self._hashes += list(chain(self._hashes[-1], records))
            self._records.extend(records)
            return position

    def read(self, start: int = 0, limit: int | None = None) -> list[bytes]:
        with self._lock:
            self._check_open()
            return self._records[start : None if limit is None else start + limit]

    def read_on(self, cursor: Cursor, limit: int | None = None) -> tuple[list[bytes], Cursor]:
        with self._lock:
            self._check_open()
            self._check_history(cursor)
            records = self._records[cursor.position : None if limit is None else cursor.position + limit]
            end = cursor.position + len(records)
            return records, Cursor(end, self._hashes[end])

    def __len__(self) -> int:
        with self._lock:
            self._check_open()
            return len(self._records)

    def acquire_all(self, names: Iterable[str], owner: str, seconds: float) -> dict[str, int] | None:
        check_seconds(seconds)
        with self._lock:
            self._check_open()
            now = self._clock()
            wanted = list(dict.fromkeys(names))
            running = {name: lease for name in wanted if (lease := self._leases.get(name)) and lease.expires > now}
            if any(lease.owner != owner for lease in running.values()):
                return None
            tokens = {}
            for name in wanted:
                if name in running:
                    tokens[name] = running[name].token
                else:
                    self._token += 1
                    tokens[name] = self._token
                self._leases[name] = _Held(owner, tokens[name], now + seconds)
            return tokens

    def renew_all(self, tokens: Mapping[str, int], seconds: float) -> set[str]:
        check_seconds(seconds)
        with self._lock:
            self._check_open()
            expires = self._clock() + seconds
            lost = self._not_held(tokens)
            for name in tokens.keys() - lost:
                self._leases[name] = _Held(self._leases[name].owner, tokens[name], expires)
            return lost

    def release_all(self, tokens: Mapping[str, int]) -> set[str]:
        with self._lock:
            self._check_open()
            lost = self._not_held(tokens)
            for name in tokens.keys() - lost:
                del self._leases[name]
            return lost

    def holder(self, name: str) -> Lease | None:
        with self._lock:
            self._check_open()
            lease, now = self._leases.get(name), self._clock()
            if lease is None or lease.expires <= now:
                return None
            return Lease(lease.owner, lease.token, lease.expires - now)

    def write_snapshot(self, content: bytes) -> None:
        with self._lock:
            self._check_open()
            self._snapshot = content

    def read_snapshot(self) -> bytes | None:
        with self._lock:
            self._check_open()
            return self._snapshot

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def _not_held(self, tokens: Mapping[str, int]) -> set[str]:
        return {
            name for name, token in tokens.items() if (lease := self._leases.get(name)) is None or lease.token != token
        }

    def _check_history(self, cursor: Cursor) -> None:
        length = len(self._records)
        if cursor.position > length or self._hashes[cursor.position] != cursor.hash:
            raise history_changed("the journal in memory", cursor, length)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the journal in memory is closed")
