"""The Journal port: an append-only log of facts that every process folds alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from hpstage.errors import HistoryChanged
from hpstage.store.cursor import Cursor

NO_FENCES: Mapping[str, int] = MappingProxyType({})


class Journal(ABC):
    """An ordered log of opaque byte records (UTF-8 JSON, one fact each).

    Obligations. *Atomic*: the records of one ``append`` become visible together, in order, or not at all.
    *Total order*: all readers in all threads and processes see the same records at the same positions;
    positions are 0, 1, 2, ... without gaps. *Durable*: when ``append`` returns, the records survive ``kill
    -9`` of any process (not necessarily a power cut). *Fenced*: with
    ``fences``, names of leases and the tokens by which the writer holds them, the append is applied only if all are
    held with these tokens (see :class:`Leases`), else it raises :class:`LeaseLost` and changes nothing; by this, a
    writer that was taken for dead can commit nothing that another has begun anew. *Conditional*: with ``expect``, the
    append is applied only if the log ends there, else it returns ``None`` and changes nothing; by this, writers that
    fold the log can decide on what they have read. Fences are looked at before ``expect``. *Honest*: with a
    :class:`Cursor`, ``append`` and ``read_on`` raise :class:`HistoryChanged`, and change nothing, if the log does not
    begin with the records that the cursor has passed; by this, nobody goes on with a fold of records that a store has
    lost. *Safe*: instances may be used from several threads and opened by several processes. Failures are
    :class:`StoreError` and name the path and the remedy (full disk, read-only).
    """

    @abstractmethod
    def append(
        self,
        records: Sequence[bytes],
        *,
        expect: Cursor | None = None,
        fences: Mapping[str, int] = NO_FENCES,
    ) -> int | None:
        """Append and return the position of the first record (``None``: ``expect`` did not hold)."""

    @abstractmethod
    def read(self, start: int = 0, limit: int | None = None) -> list[bytes]:
        """Records from position ``start`` on, at most ``limit``."""

    @abstractmethod
    def read_on(self, cursor: Cursor, limit: int | None = None) -> tuple[list[bytes], Cursor]:
        """Records from ``cursor`` on, at most ``limit``, and the cursor behind them."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def close(self) -> None:
        """Release resources. Idempotent; other methods then raise :class:`StoreError`."""


def history_changed(where: str, cursor: Cursor, length: int) -> HistoryChanged:
    """What a journal says that holds ``length`` records, but not those that ``cursor`` has passed."""
    return HistoryChanged(
        f"{where} has lost records: the {cursor.position} that this process has read are not those that it holds now "
        f"({length} in all), so it was put back to an earlier state and may have been written to since (a failover to "
        f"a replica that lagged, a host that crashed before its disk was written, a copy that was restored); run again "
        f"to go on from what it has, and set appendfsync always on a Redis server"
    )
