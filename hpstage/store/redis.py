"""RedisJournal: a store on a Redis server, shared by processes of many hosts."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from hpstage.errors import LeaseLost, StoreError, UsageError
from hpstage.errors.text import other_format
from hpstage.store import redis_scripts as scripts
from hpstage.store.cursor import HASH_LENGTH, Cursor
from hpstage.store.journal import NO_FENCES, Journal, Lease, check_seconds, history_changed
from hpstage.store.redis_scripts import Script
from hpstage.store.redis_server import Argument, RedisServer

logger = logging.getLogger("hpstage")

OLDEST = (6, 2)
# Seconds that opening waits for an unavailable server: long enough for a restart, short for a wrong address.
OPENING = 5.0
# Bytes of a snapshot per command, and the seconds after which the server forgets the parts of a writer that died.
PART = 1 << 20
FORGOTTEN = 600
# Records per reply: 100 MB with records of 100 kB; a round trip costs as much as 100 records.
CHUNK = 1000


class RedisJournal(Journal):
    """A journal and leases on the Redis server at ``url``, under keys that start with ``{prefix}:``.

    Redis 6.2 or newer, a single server (no Redis Cluster). Acknowledged records are as safe as the server keeps them:
    with ``appendonly yes`` they survive ``kill -9`` of the server. Two stores on a server need different prefixes.

    While the server is unavailable, calls wait and are retried for ``patience`` seconds, then raise
    :class:`StoreError`. An append is applied once however often it is retried. An append that raised may have been
    applied or may still be, until the handle's next append, but never after it. A ``release`` that was retried may
    report that the lease was not held. A server that has lost the store (restarted without its file, flushed) is
    refused.

    Handles may be used from several threads; appends of one handle take turns. After a fork, open a new handle.

    Args:
        url: ``redis://[[user]:password@]host[:port][/db]``, ``rediss://`` for TLS (with redis-py's options for
            certificates, such as ``?ssl_ca_certs=FILE``), ``unix://[user:password@]/path``. The password is never
            shown.
        prefix: any string without braces.
        patience: maximum seconds to wait.
    """

    def __init__(self, url: str, *, prefix: str = "hpstage", patience: float = 60.0) -> None:
        if not prefix or "{" in prefix or "}" in prefix:
            raise UsageError(f"prefix={prefix!r}: give a text without braces")
        self.prefix = prefix
        self._keys = [f"{{{prefix}}}:{name}" for name in ("log", "about", "handles", "leases", "snapshot")]
        self._server = RedisServer(url, patience)
        self.address = f"{self._server.where}?prefix={quote(prefix, safe=':')}"
        self._owner = os.getpid()
        self._handle = uuid.uuid4().hex
        self._appending = threading.Lock()
        self._appends = 0
        try:
            self._check_server(min(OPENING, patience))
            answer = self._server.run(scripts.OPEN, self._keys, [scripts.FORMAT, uuid.uuid4().hex])
            match answer:
                case [b"open", form, identity] if form == b"%d" % scripts.FORMAT:
                    self._id: bytes = identity
                case [b"open", form, _]:
                    raise StoreError(other_format(self._where, int(form), scripts.FORMAT, "choose another prefix"))
                case [_, key, kind]:
                    raise StoreError(
                        f"{self._where}: the key {key.decode()} holds something else (a {kind.decode()}); choose "
                        f"another prefix"
                    )
        except BaseException:
            self._server.close()
            raise

    def __repr__(self) -> str:
        return f"RedisJournal({self._server.where!r}, prefix={self.prefix!r})"

    def append(
        self, records: Sequence[bytes], *, expect: Cursor | None = None, fences: Mapping[str, int] = NO_FENCES
    ) -> int | None:
        with self._appending:
            self._appends += 1
            answer = self._run(
                scripts.APPEND,
                self._handle,
                self._appends,
                "" if expect is None else expect.position,
                b"" if expect is None else expect.hash,
                len(fences),
                *_pairs(fences),
                *records,
            )
        match answer:
            case [b"at", position]:
                return int(position)
            case [b"changed", length] if expect is not None:
                raise history_changed(self._where, expect, length)
            case [b"lost", *names]:
                raise LeaseLost(name.decode() for name in names)
            case _:
                return None

    def read(self, start: int = 0, limit: int | None = None) -> list[bytes]:
        return self._read(start, None, len(self), limit)[0]

    def read_on(self, cursor: Cursor, limit: int | None = None) -> tuple[list[bytes], Cursor]:
        _, length, hash = self._run(scripts.HASH, cursor.position)
        if hash != cursor.hash:
            raise history_changed(self._where, cursor, length)
        records, hash = self._read(cursor.position, hash, length, limit)
        return records, Cursor(cursor.position + len(records), hash)

    def _read(self, first: int, hash: bytes | None, length: int, limit: int | None) -> tuple[list[bytes], Any]:
        """Return records and the hash of the last one; ``hash`` is that of the record before them, if known."""
        stop = length if limit is None else min(length, first + limit)
        records: list[bytes] = []
        while first < stop:
            count = min(CHUNK, stop - first)
            self._check_process()
            entries = self._server.command("XRANGE", self._keys[0], first + 1, "+", "COUNT", count) or []
            if len(entries) < count or entries[-1][0] != b"%d-0" % (first + count):
                raise self._gone()
            stored = [fields[1] for _, fields in entries]
            records += [record[:-HASH_LENGTH] for record in stored]
            if hash is not None:
                # The log may have been rolled back and appended to between two commands.
                place = Cursor(first, hash)
                if place.after(records[-count:][:1]).hash != stored[0][-HASH_LENGTH:]:
                    raise history_changed(self._where, place, length)
            first, hash = first + count, stored[-1][-HASH_LENGTH:]
        return records, hash

    def __len__(self) -> int:
        _, length = self._run(scripts.LENGTH)
        return int(length)

    def acquire_all(self, names: Iterable[str], owner: str, seconds: float) -> dict[str, int] | None:
        wanted = list(dict.fromkeys(names))
        match self._run(scripts.ACQUIRE, _microseconds(seconds), owner, *wanted):
            case [b"given", *tokens]:
                return dict(zip(wanted, map(int, tokens), strict=True))
            case _:
                return None

    def renew_all(self, tokens: Mapping[str, int], seconds: float) -> set[str]:
        _, *lost = self._run(scripts.RENEW, _microseconds(seconds), *_pairs(tokens))
        return {name.decode() for name in lost}

    def release_all(self, tokens: Mapping[str, int]) -> set[str]:
        _, *lost = self._run(scripts.RELEASE, *_pairs(tokens))
        return {name.decode() for name in lost}

    def holder(self, name: str) -> Lease | None:
        match self._run(scripts.HOLDER, name):
            case [b"held", owner, token, left]:
                return Lease(owner.decode(), int(token), int(left) / 1e6)
            case _:
                return None

    def write_snapshot(self, content: bytes) -> None:
        id = uuid.uuid4().hex
        keys = [*self._keys, f"{self._keys[4]}:{id}"]
        parts = range(0, max(1, len(content)), PART)
        for index, start in enumerate(parts):
            self._run(scripts.WRITE_PART, FORGOTTEN, index, content[start : start + PART], keys=keys)
        self._run(scripts.REPLACE_SNAPSHOT, id, len(parts), keys=keys)

    def read_snapshot(self) -> bytes | None:
        known = None
        parts: list[bytes] = []
        while True:
            match self._run(scripts.READ_PART, len(parts)):
                case [b"part", id, *_] if parts and id != known:  # it has been replaced since: read the new one
                    parts = []
                case [b"part", known, count, bytes(part)]:
                    parts.append(part)
                    if len(parts) == int(count):
                        return b"".join(parts)
                case _:
                    return None

    def close(self) -> None:
        if self._owner != os.getpid():
            self._server.forget()
            return
        # The server's record of this handle is no longer needed, unless one of its appends may still be in flight.
        if self._appends and self._server.answered and not self._server.closed:
            with suppress(StoreError):
                self._server.command("HDEL", self._keys[2], self._handle, patience=0)
        self._server.close()

    def _check_server(self, patience: float) -> None:
        about = self._server.command("INFO", patience=patience)
        version = str(about["redis_version"])
        if tuple(map(int, version.split(".")[:2])) < OLDEST:
            raise StoreError(f"{self._where} is Redis {version}; hpstage needs 6.2 or newer")
        policy = about.get("maxmemory_policy", "")
        if policy.startswith("allkeys") and about.get("maxmemory"):
            raise StoreError(
                f"{self._where}: the server evicts keys when memory is short (maxmemory-policy {policy}), which "
                f"would lose the journal; set it to noeviction"
            )
        if not about.get("aof_enabled"):
            logger.warning(
                "%s: the server keeps no append-only file: if it dies, records written since its last snapshot are "
                "lost; set appendonly yes",
                self._where,
            )

    @property
    def _where(self) -> str:
        return f"the store at {self._server.where} under prefix {self.prefix!r}"

    def _run(self, script: Script, *arguments: Argument, keys: Sequence[str] = ()) -> list[Any]:
        self._check_process()
        answer = self._server.run(script, keys or self._keys, [self._id, *arguments])
        if answer == [b"gone"]:
            raise self._gone()
        if answer == [b"trimmed"]:
            raise StoreError(
                f"{self._where} has lost records that were in it: somebody has removed {self._keys[0]} or entries "
                f"of it (DEL, XTRIM, XDEL); restore a copy of it, or choose another prefix"
            )
        return answer

    def _check_process(self) -> None:
        if self._owner != os.getpid():
            raise StoreError(f"{self._where} was opened before a fork; open it again in this process")

    def _gone(self) -> StoreError:
        return StoreError(
            f"{self._where} has lost records that were in it: the server was flushed, restarted without its file, or "
            f"replaced by a replica that lagged behind; run again to continue from what it has, and set appendonly yes"
        )


def _pairs(tokens: Mapping[str, int]) -> list[Argument]:
    return [part for pair in tokens.items() for part in pair]


def _microseconds(seconds: float) -> int:
    check_seconds(seconds)
    return max(1, round(seconds * 1e6))
