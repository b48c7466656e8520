"""Copying the records of one journal to another: byte for byte, in order, resumable after any interruption."""

from __future__ import annotations

from hpstage.errors import HistoryChanged, StoreError, UsageError
from hpstage.store.cursor import Cursor
from hpstage.store.journal import Journal

# Records per append.
_BATCH = 1000


def common_end(source: Journal, end: Cursor, target: Journal, name: str) -> Cursor:
    """Return the end of the target's log, which must be a beginning of the source's log up to ``end``.

    Args:
        name: name of the target, for errors.

    Raises:
        UsageError: the target holds another log, or continues this one.
    """
    there = len(target)
    at = end
    if there < end.position:
        at = Cursor()
        while at.position < there:
            _, at = source.read_on(at, min(_BATCH, there - at.position))
    try:
        target.read_on(at, 0)
    except HistoryChanged as error:
        raise UsageError(
            f"{name} holds another plan, or other records were added to it since this plan was copied there; give "
            f"another destination"
        ) from error
    if there > end.position:
        raise UsageError(
            f"{name} is newer than the store: it has all records of this plan, and {there - end.position:,} of later "
            f"searches. Copy in the other direction, or give another destination"
        )
    return at


def copy_records(source: Journal, begin: Cursor, end: Cursor, target: Journal, name: str) -> None:
    """Append the source's records from ``begin`` to ``end`` to the target, which ends at ``begin``; then compare all.

    Raises:
        StoreError: the target was written to concurrently, or differs.
    """
    while begin.position < end.position:
        records, behind = source.read_on(begin, min(_BATCH, end.position - begin.position))
        if target.append(records, expect=begin) is None:
            raise StoreError(f"{name} was written to by another process; run again once that has ended")
        begin = behind
    for start in range(0, end.position, _BATCH):
        count = min(_BATCH, end.position - start)
        if source.read(start, count) != target.read(start, count):
            raise StoreError(f"{name} differs in records {start} to {start + count}; remove it, and copy again")
