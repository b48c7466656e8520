"""Journal port and its implementations: where facts are remembered."""

from hpstage.store.journal import Journal
from hpstage.store.memory import MemoryJournal
from hpstage.store.sqlite import SQLiteJournal

__all__ = ["Journal", "MemoryJournal", "SQLiteJournal"]
