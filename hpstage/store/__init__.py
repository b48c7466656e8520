"""Journal, Leases and Snapshots ports, and the stores that implement all: where facts and rights are persisted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpstage.store.cursor import Cursor
from hpstage.store.journal import Journal
from hpstage.store.leases import Lease, Leases
from hpstage.store.memory import MemoryJournal
from hpstage.store.snapshots import Snapshots
from hpstage.store.sqlite import SQLiteJournal
from hpstage.store.store import Store

if TYPE_CHECKING:
    from hpstage.store.redis import RedisJournal

__all__ = [
    "Cursor",
    "Journal",
    "Lease",
    "Leases",
    "MemoryJournal",
    "RedisJournal",
    "SQLiteJournal",
    "Snapshots",
    "Store",
]


def __getattr__(name: str) -> Any:
    # Imported on first use, since it needs the redis client.
    if name == "RedisJournal":
        from hpstage.store.redis import RedisJournal

        return RedisJournal
    raise AttributeError(f"module 'hpstage.store' has no attribute {name!r}")
