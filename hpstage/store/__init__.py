"""The Journal port and the stores that implement it: where facts and rights are persisted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpstage.errors.deprecation import deprecated
from hpstage.store.cursor import Cursor
from hpstage.store.journal import Journal, Lease
from hpstage.store.memory import MemoryJournal
from hpstage.store.sqlite import SQLiteJournal

if TYPE_CHECKING:
    from hpstage.store.redis import RedisJournal

__all__ = [
    "Cursor",
    "Journal",
    "Lease",
    "MemoryJournal",
    "RedisJournal",
    "SQLiteJournal",
]


def __getattr__(name: str) -> Any:
    # Imported on first use, since it needs the redis client.
    if name == "RedisJournal":
        from hpstage.store.redis import RedisJournal

        return RedisJournal
    if name in ("Store", "Leases", "Snapshots"):  # until 0.3
        deprecated(f"hpstage.store.{name}", "hpstage.store.Journal")
        return Journal
    raise AttributeError(f"module 'hpstage.store' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
