"""Journal and Leases ports and the stores that have both: where facts and rights are remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpstage.store.cursor import Cursor
from hpstage.store.journal import Journal
from hpstage.store.leases import Lease, Leases
from hpstage.store.memory import MemoryJournal
from hpstage.store.sqlite import SQLiteJournal
from hpstage.store.store import Store

if TYPE_CHECKING:
    from hpstage.store.redis import RedisJournal

__all__ = ["Cursor", "Journal", "Lease", "Leases", "MemoryJournal", "RedisJournal", "SQLiteJournal", "Store"]


def __getattr__(name: str) -> Any:
    # Loaded when it is first used: it brings the redis client.
    if name == "RedisJournal":
        from hpstage.store.redis import RedisJournal

        return RedisJournal
    raise AttributeError(f"module 'hpstage.store' has no attribute {name!r}")
