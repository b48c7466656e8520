"""The Journal port: an append-only log of facts that every process folds in the same way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hpstage.errors import HistoryChanged
from hpstage.store.cursor import Cursor

NO_FENCES: Mapping[str, int] = MappingProxyType({})


class Journal(ABC):
    """An ordered log of opaque byte records (UTF-8 JSON, each a fact or an array of facts).

    Obligations. *Atomic*: the records of one ``append`` become visible together, in order, or not at all. *Total
    order*: all readers in all threads and processes see the same records at the same positions; positions are 0, 1, 2,
    ... without gaps. *Durable*: when ``append`` returns, the records survive ``kill -9`` of any process (not
    necessarily a power cut). *Fenced*: ``fences`` maps names of leases to the tokens with which the writer holds them.
    The append is applied only if all of them are held with these tokens (see :class:`Leases`); otherwise it raises
    :class:`LeaseLost` and changes nothing. Thus a writer that was presumed dead cannot commit work that another has
    restarted. *Conditional*: with ``expect``, the append is applied only if the log ends there; otherwise it returns
    ``None`` and changes nothing. Thus writers that fold the log can base decisions on what they have read. Fences are
    checked before ``expect``. *Honest*: with a :class:`Cursor`, ``append`` and ``read_on`` raise
    :class:`HistoryChanged`, and change nothing, if the log does not start with the records before the cursor. Thus no
    process continues with a fold of records that a store has lost. *Safe*: instances may be used from several threads
    and opened by several processes. Failures are :class:`StoreError` and name the path and the remedy (full disk,
    read-only).
    """

    @abstractmethod
    def append(
        self,
        records: Sequence[bytes],
        *,
        expect: Cursor | None = None,
        fences: Mapping[str, int] = NO_FENCES,
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
