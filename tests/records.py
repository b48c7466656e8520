"""Journals for tests that look at a journal fact by fact."""

from __future__ import annotations

from hpstage.plan.log import split
from hpstage.store import Journal, MemoryJournal


def separated(journal: Journal) -> MemoryJournal:
    """The same facts, each in a record of its own."""
    found = MemoryJournal()
    found.append([fact for record in journal.read() for fact in split(record)])
    return found
