"""The Journal port: an append-only log of facts, the leases of its writers, and a snapshot of its fold."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hpstage.errors import HistoryChanged, UsageError
from hpstage.store.cursor import Cursor

NO_FENCES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that has not expired: its owner, its fencing token, and the remaining seconds."""

    owner: str
    token: int
    seconds: float


class Journal(ABC):
    """A log that every process folds in the same way, the leases of its writers, and a snapshot of its fold.

    **The log** is of opaque byte records (UTF-8 JSON, each a fact or an array of facts). *Atomic*: the records of one
    ``append`` become visible together, in order, or not at all. *Total order*: all readers in all threads and processes
    see the same records at the same positions; positions are 0, 1, 2, ... without gaps. *Durable*: when ``append``
    returns, the records survive ``kill -9`` of any process (not necessarily a power cut). *Fenced*: ``fences`` maps
    names of leases to the tokens with which the writer holds them. The append is applied only if all of them are held
    with these tokens; otherwise it raises :class:`LeaseLost` and changes nothing. Thus a writer that was presumed dead
    cannot commit work that another has restarted. *Conditional*: with ``expect``, the append is applied only if the log
    ends there; otherwise it returns ``None`` and changes nothing. Thus writers that fold the log can base decisions on
    what they have read. Fences are checked before ``expect``. *Honest*: with a :class:`Cursor`, ``append`` and
    ``read_on`` raise :class:`HistoryChanged`, and change nothing, if the log does not start with the records before the
    cursor. Thus no process continues with a fold of records that a store has lost.

    **Leases** are named rights, each held by one owner at a time, for a limited time. An owner names one life of a
    process (a process that restarts takes another name). A token is positive and larger than every token that the store
    has given before, hence also than every earlier one of its name. A lease is *held* by a token from ``acquire`` until
    it is released or taken by another ``acquire``. It *expires* after its seconds, and from then on anyone may take it.
    Expiry alone takes nothing from the holder: it can still renew, and commit what it has trained, as long as no other
    owner has taken the lease. So an owner that was suspended for a while, or cut off by a restart of the store, loses
    work only to an owner that does it instead. It is the tokens, not the clock, that prevent two owners from both
    committing. *Atomic*: each call is executed as a whole, and calls are serialized over all threads and processes.
    *Time is the store's*: no call carries the caller's time, so that a host whose clock is wrong by an hour does no
    harm. A store whose clock is set back neither shortens nor lengthens a lease by more than the lease's duration.

    **The snapshot**, opaque bytes of up to some hundred MB, only saves time: its readers check it, and fold the log if
    it cannot be used. So a store need not prevent a late writer from replacing a newer snapshot. *Whole*: a read
    returns the content of one write, never parts of several; a writer that dies leaves the snapshot unchanged, and its
    remains do not stay for ever. *Dispensable*: it may be lost at any time, and a call may write nothing while another
    writes. *Separate*: neither call makes appends and reads of the log wait.

    *Safe*: instances may be used from several threads and opened by several processes. Failures are
    :class:`StoreError` and name the path and the remedy (full disk, read-only).
    """

    @abstractmethod
    def append(
        self, records: Sequence[bytes], *, expect: Cursor | None = None, fences: Mapping[str, int] = NO_FENCES
    ) -> int | None:
        """Append and return the position of the first record; ``None`` if ``expect`` is not the end of the log."""

    @abstractmethod
    def read(self, start: int = 0, limit: int | None = None) -> list[bytes]:
        """Return the records from position ``start`` on, at most ``limit``."""

    @abstractmethod
    def read_on(self, cursor: Cursor, limit: int | None = None) -> tuple[list[bytes], Cursor]:
        """Return the records from ``cursor`` on, at most ``limit``, and the cursor after them."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def acquire_all(self, names: Iterable[str], owner: str, seconds: float) -> dict[str, int] | None:
        """Acquire all ``names`` for ``owner`` for ``seconds`` and return their tokens; ``None`` if another has one.

        All or none, so that one of two owners that want parts of the same chain succeeds. A lease that ``owner`` holds
        and that has not expired keeps its token.
        """

    @abstractmethod
    def renew_all(self, tokens: Mapping[str, int], seconds: float) -> set[str]:
        """Renew the leases for ``seconds`` from now; return the names that are not held with their tokens (any more).

        The held ones are renewed even if others are not held. A lease that has expired, but was not taken, is renewed.
        """

    @abstractmethod
    def release_all(self, tokens: Mapping[str, int]) -> set[str]:
        """Release the leases; return the names that were not held with their tokens (any more)."""

    @abstractmethod
    def holder(self, name: str) -> Lease | None:
        """Return the lease of ``name``, if it exists and has not expired."""

    def acquire(self, name: str, owner: str, seconds: float) -> int | None:
        """Acquire ``name`` for ``owner`` for ``seconds`` from now and return its token; ``None`` if another has it."""
        tokens = self.acquire_all([name], owner, seconds)
        return None if tokens is None else tokens[name]

    def release(self, name: str, token: int) -> bool:
        """Release the lease; return whether it was held with ``token``."""
        return not self.release_all({name: token})

    @abstractmethod
    def write_snapshot(self, content: bytes) -> None:
        """Replace the snapshot."""

    @abstractmethod
    def read_snapshot(self) -> bytes | None:
        """Return the snapshot; ``None`` if there is none."""

    @abstractmethod
    def close(self) -> None:
        """Release resources. Idempotent; other methods then raise :class:`StoreError`."""


def history_changed(where: str, cursor: Cursor, length: int) -> HistoryChanged:
    """Return the error of a journal with ``length`` records that do not include those before ``cursor``."""
    return HistoryChanged(
        f"{where} has lost records: the {cursor.position} that this process has read are not those that it holds now "
        f"({length} in all), so it was put back to an earlier state and may have been written to since (a failover to "
        f"a replica that lagged, a host that crashed before its disk was written, a copy that was restored); run again "
        f"to continue from what it has, and set appendfsync always on a Redis server"
    )


def check_seconds(seconds: float) -> None:
    """Raise :class:`UsageError` unless ``seconds`` is a valid duration of a lease."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"a lease of {seconds} seconds: give a positive, finite number")
