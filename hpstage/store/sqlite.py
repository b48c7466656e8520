"""SQLiteJournal: a store in a single file, with a snapshot next to it, shared by the processes of one host."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from hpstage.errors import LeaseLost, StoreError
from hpstage.errors.text import other_format
from hpstage.store.cursor import Cursor, chain
from hpstage.store.held_files import GENERATION, HeldFiles
from hpstage.store.journal import NO_FENCES, Journal, Lease, check_seconds, history_changed
from hpstage.store.mounts import network_mount

# PRAGMA user_version of the file. A change to the tables must raise it.
SCHEMA = 4
# PRAGMA application_id of the file: "hpst".
APPLICATION = int.from_bytes(b"hpst", "big")

# Seconds between two attempts where SQLite itself does not wait for a lock.
POLL = 0.005

# Environment variable that overrides network_mount when set to "1", if all processes that use the file run on one host.
ALLOWED = "HPSTAGE_SQLITE_ON_NETWORK"

_TABLES = (
    # The position is SQLite's row number, so appending goes to the end of one B-tree. The hash is the chain's.
    "CREATE TABLE log (position INTEGER PRIMARY KEY, record BLOB NOT NULL, hash BLOB NOT NULL)",
    "CREATE TABLE leases (name TEXT PRIMARY KEY, owner TEXT NOT NULL, token INTEGER NOT NULL, "
    "began REAL NOT NULL, seconds REAL NOT NULL) WITHOUT ROWID",
    # The last token given, in one row, so that tokens keep growing even if leases are deleted.
    "CREATE TABLE tokens (last INTEGER NOT NULL)",
    "INSERT INTO tokens VALUES (0)",
    GENERATION,
    "INSERT INTO generation VALUES (hex(randomblob(16)))",
)

_REMEDIES = {
    sqlite3.SQLITE_FULL: "the disk is full; free some space and run again, nothing acknowledged is lost",
    sqlite3.SQLITE_READONLY: "it is read-only; give this user write permission to the file and its folder",
    sqlite3.SQLITE_PERM: "it is read-only; give this user write permission to the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened; see that its folder exists and that you may write there",
    sqlite3.SQLITE_BUSY: "another process has kept it locked; find and end that process, or wait longer",
    sqlite3.SQLITE_IOERR: "reading or writing failed; check the disk, its quota and its free space",
    sqlite3.SQLITE_CORRUPT: "it is damaged; recover it with the sqlite3 tool's .recover, or restore a copy",
    sqlite3.SQLITE_ERROR: "another program has changed it; restore a copy, or choose another path",
    sqlite3.SQLITE_NOTADB: "it is not a journal of hpstage; choose another path",
}


class SnapshotFile:
    """The snapshot at ``path``, for all threads and processes of one host."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_name(f"{path.name}-part")

    def write(self, content: bytes) -> None:
        """Replace the snapshot, unless another process does so at this moment."""
        # The lock ends with its process, so that the next writer overwrites the remains of a dead one.
        with open(self._part, "ab") as part:
            try:
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not os.path.samestat(os.fstat(part.fileno()), os.stat(self._part)):
                    return  # another process has just put it in place
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


class _Changed(sqlite3.DatabaseError):
    """The content of the database is not that of a journal."""

    sqlite_errorcode = sqlite3.SQLITE_ERROR


class SQLiteJournal(Journal):
    """A journal and leases in the SQLite file ``path``, for all threads and processes of one host.

    The snapshot is a file next to it, ``path`` with ``-snapshot`` at its end, which can be removed at any time.

    The file and its folder are created if missing. Writers take turns; one that waits longer than ``patience`` seconds
    raises :class:`StoreError`. Appended records survive ``kill -9`` at once; a power cut may lose the last ones
    (``synchronous=NORMAL``), but never the order or records in the middle. Network file systems (NFS, SMB, Lustre) do
    not carry the locks and shared memory of SQLite's write-ahead log from host to host. They are refused, unless
    ``HPSTAGE_SQLITE_ON_NETWORK=1`` asserts that all processes are on one host. Must not be used across a fork: open a
    new instance in the child. A handle serves one call at a time.

    Args:
        clock: returns seconds, the same for all processes of the host; determines when leases expire. The default
            counts from the host's start and cannot be set, so jumps of the wall clock do not matter. A lease that seems
            to begin in the future was given before the host's last start: its owner is gone, and it counts as expired.
        read_only: for readers only: the file must exist, no method writes to it, and remains of a writer that died are
            not cleaned up. SQLite may leave its two auxiliary files there. Needs no write permission, unless the
            last writer was killed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        patience: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        read_only: bool = False,
    ) -> None:
        self.path = Path(path).absolute()
        self.address = str(self.path.parent)
        _refuse_network(self.path)
        self._clock = clock
        self._owner = os.getpid()
        self._read_only = read_only
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._look_again: Callable[[], sqlite3.Connection] | None = None
        # Not in the database: its writers would have to wait while so many bytes are written, twice.
        self._snapshot = SnapshotFile(self.path.with_name(f"{self.path.name}-snapshot"))
        if read_only:
            with self._explained():
                self._connection = self._looking_on(patience)
            return
        deadline = time.monotonic() + patience
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make the folder of journal {self.path}: {error.strerror}") from error
        with self._explained():
            connection = sqlite3.connect(self.path, timeout=patience, isolation_level=None, check_same_thread=False)
            try:
                # First, so that another application's database is left unchanged.
                _persist(lambda: self._prepare(connection), deadline)
                # Two processes that both switch a new file to write-ahead logging collide in a lock for which SQLite
                # itself does not wait, since waiting could be a deadlock: with four at once, 8 of 480 opens failed.
                _persist(lambda: connection.execute("PRAGMA journal_mode=WAL"), deadline)
                connection.execute("PRAGMA synchronous=NORMAL")
                _end(connection)  # makes the auxiliary files
                self._held = HeldFiles(self.path)
            except BaseException:
                connection.close()
                raise
            self._connection = connection

    def append(
        self, records: Sequence[bytes], *, expect: Cursor | None = None, fences: Mapping[str, int] = NO_FENCES
    ) -> int | None:
        with self._writing() as connection:
            if lost := _not_held(connection, fences):
                raise LeaseLost(lost)
            end = _end(connection)
            if expect is not None and expect != end:
                self._check_history(connection, expect)
                return None
            position = end.position
            rows = zip(count(position), records, chain(end.hash, records), strict=False)
            connection.executemany("INSERT INTO log VALUES (?, ?, ?)", rows)
            return position

    def read(self, start: int = 0, limit: int | None = None) -> list[bytes]:
        with self._lock, self._explained():
            return _records(self._open(), start, limit)

    def read_on(self, cursor: Cursor, limit: int | None = None) -> tuple[list[bytes], Cursor]:
        with self._lock, self._explained():
            connection = self._open()
            self._check_history(connection, cursor)
            records = _records(connection, cursor.position, limit)
            if not records:
                return records, cursor
            end = cursor.position + len(records)
            (hash,) = connection.execute("SELECT hash FROM log WHERE position = ?", (end - 1,)).fetchone()
            return records, Cursor(end, hash)

    def __len__(self) -> int:
        with self._lock, self._explained():
            return _end(self._open()).position

    def acquire_all(self, names: Iterable[str], owner: str, seconds: float) -> dict[str, int] | None:
        check_seconds(seconds)
        with self._writing() as connection:
            now = self._clock()
            tokens: dict[str, int | None] = {}
            for name in names:
                lease = self._running(connection, name, now)
                if lease is not None and lease.owner != owner:
                    return None
                tokens[name] = None if lease is None else lease.token
            (last,) = connection.execute("SELECT last FROM tokens").fetchone() or (None,)
            if not isinstance(last, int):
                raise _Changed("the last token is not there")
            given = {}
            for name, token in tokens.items():
                last += token is None
                given[name] = last if token is None else token
            connection.execute("UPDATE tokens SET last = ?", (last,))
            connection.executemany(
                "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?)",
                ((name, owner, token, now, seconds) for name, token in given.items()),
            )
            return given

    def renew_all(self, tokens: Mapping[str, int], seconds: float) -> set[str]:
        check_seconds(seconds)
        with self._writing() as connection:
            lost = _not_held(connection, tokens)
            now = self._clock()
            connection.executemany(
                "UPDATE leases SET began = ?, seconds = ? WHERE name = ?",
                ((now, seconds, name) for name in tokens.keys() - lost),
            )
            return lost

    def release_all(self, tokens: Mapping[str, int]) -> set[str]:
        with self._writing() as connection:
            lost = _not_held(connection, tokens)
            connection.executemany("DELETE FROM leases WHERE name = ?", ((name,) for name in tokens.keys() - lost))
            return lost

    def holder(self, name: str) -> Lease | None:
        with self._lock, self._explained():
            return self._running(self._open(), name, self._clock())

    def write_snapshot(self, content: bytes) -> None:
        with self._lock:
            self._open()
        if self._read_only:
            raise StoreError(f"journal {self.path} was opened read-only")
        try:
            self._snapshot.write(content)
        except OSError as error:
            raise StoreError(f"cannot write {self._snapshot.path}: {error.strerror}") from error

    def read_snapshot(self) -> bytes | None:
        with self._lock:
            self._open()
        try:
            return self._snapshot.read()
        except OSError as error:
            raise StoreError(f"cannot read {self._snapshot.path}: {error.strerror}") from error

    def close(self) -> None:
        with self._lock:
            # After a fork, closing would drop the parent's locks, so the child only forgets the connection.
            if self._connection is not None and self._owner == os.getpid():
                self._connection.close()
            self._connection = None

    def _check_history(self, connection: sqlite3.Connection, cursor: Cursor) -> None:
        last = connection.execute("SELECT hash FROM log WHERE position = ?", (cursor.position - 1,)).fetchone()
        if cursor.hash != (last[0] if last else None if cursor.position else b""):
            raise history_changed(f"journal {self.path}", cursor, _end(connection).position)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Run one transaction with the write lock from its start; roll back if it fails."""
        if self._read_only:
            raise StoreError(f"journal {self.path} was opened read-only")
        with self._lock, self._explained():
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            try:
                self._held.check()
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                # SQLite itself rolls back after some errors (such as a full disk), but not after all.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @staticmethod
    def _running(connection: sqlite3.Connection, name: str, now: float) -> Lease | None:
        row = connection.execute("SELECT owner, token, began, seconds FROM leases WHERE name = ?", (name,)).fetchone()
        if row is None:
            return None
        owner, token, began, seconds = row
        return Lease(owner, token, began + seconds - now) if began <= now < began + seconds else None

    def _open(self) -> sqlite3.Connection:
        if self._owner != os.getpid():
            raise StoreError(f"journal {self.path} was opened before a fork; open it again in this process")
        if self._connection is None:
            raise StoreError(f"journal {self.path} is closed")
        if self._look_again is not None:
            look, self._look_again = self._look_again, None
            self._connection.close()
            self._connection = look()
        return self._connection

    def _looking_on(self, patience: float) -> sqlite3.Connection:
        try:
            return self._connected(patience, "mode=ro")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY):
                raise
            # SQLite cannot create the auxiliary files by which readers and writers synchronize.
            log = self.path.with_name(f"{self.path.name}-wal")
            if log.exists() and log.stat().st_size:
                raise StoreError(
                    f"journal {self.path} cannot be read without write permission to its folder, since its last writer "
                    f"was killed and left an auxiliary file: let its owner run `hpstage status` on it once, or give "
                    f"this user write permission"
                ) from error
        # Nobody is writing now. Each read connects again, since somebody may write later.
        self._look_again = lambda: self._looking_on(patience)
        return self._connected(patience, "mode=ro&immutable=1")

    def _connected(self, patience: float, how: str) -> sqlite3.Connection:
        """Return a connection for readers."""
        connection = sqlite3.connect(
            f"{self.path.as_uri()}?{how}", uri=True, timeout=patience, isolation_level=None, check_same_thread=False
        )
        try:
            if (found := _identity(connection)) != (APPLICATION, SCHEMA):
                whose = "another build of hpstage" if found[0] == APPLICATION else "something else"
                raise StoreError(f"{self.path} is a database of {whose}; hpstage does not change it")
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Create the tables, or check that they are ours, in one transaction, so that no process sees half of them."""
        if _identity(connection) == (APPLICATION, SCHEMA):
            return
        connection.execute("BEGIN IMMEDIATE")
        try:
            application, schema = _identity(connection)
            (objects,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if application == APPLICATION and schema != SCHEMA:
                raise StoreError(other_format(f"journal {self.path}", schema, SCHEMA, "choose another path"))
            if application != APPLICATION:
                if objects or application or schema:
                    raise StoreError(f"{self.path} is a database of something else; choose another path")
                connection.execute(f"PRAGMA application_id = {APPLICATION}")
                for statement in _TABLES:
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert SQLite's errors to ours, with path and remedy."""
        try:
            yield
        except sqlite3.Error as error:
            # The low byte is the kind of failure, the rest its variety.
            kind = getattr(error, "sqlite_errorcode", 0) & 0xFF
            remedy = _REMEDIES.get(kind, "this should not happen, please report it")
            raise StoreError(f"journal {self.path}: {error}: {remedy}") from error


def _refuse_network(path: Path) -> None:
    mount = network_mount(path)
    if mount is not None and os.environ.get(ALLOWED) != "1":
        raise StoreError(
            f"journal {path} would be on {mount.point}, a network file system ({mount.type}), where SQLite's locks do "
            f"not hold between hosts; give store= a folder on a local disk and checkpoints= one on the shared disk, or "
            f"share the plan by a Redis server (store='redis://host:6379'). If all processes that use it run on one "
            f"host, {ALLOWED}=1 allows it"
        )


def _identity(connection: sqlite3.Connection) -> tuple[int, int]:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (schema,) = connection.execute("PRAGMA user_version").fetchone()
    return application, schema


def _end(connection: sqlite3.Connection) -> Cursor:
    last = connection.execute("SELECT position + 1, hash FROM log ORDER BY position DESC LIMIT 1").fetchone()
    if last is None:
        return Cursor()
    if not isinstance(last[1], bytes):
        raise _Changed("the hash of the last record is not a hash")
    return Cursor(*last)


def _records(connection: sqlite3.Connection, start: int, limit: int | None) -> list[bytes]:
    rows = connection.execute(
        "SELECT record FROM log WHERE position >= ? ORDER BY position LIMIT ?", (start, -1 if limit is None else limit)
    )
    return [record for (record,) in rows]


def _not_held(connection: sqlite3.Connection, tokens: Mapping[str, int]) -> set[str]:
    return {
        name
        for name, token in tokens.items()
        if connection.execute("SELECT 1 FROM leases WHERE name = ? AND token = ?", (name, token)).fetchone() is None
    }


def _persist(action: Callable[[], object], deadline: float) -> None:
    """Retry ``action`` while the file is locked, until ``deadline``."""
    while True:
        try:
            action()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                raise
            time.sleep(POLL)
