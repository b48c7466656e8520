"""Writes snapshots of a driver's plan, so that a process that opens it later need not fold all of its journal."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from hpstage.errors import StoreError
from hpstage.plan.plan import SearchPlan
from hpstage.store import Journal

logger = logging.getLogger("hpstage")

# Minimum number of records between snapshots. To fold them takes a tenth of a second if each record has one fact, and a
# second if each has ten.
LEAST = 10_000
# A snapshot is due when the records after the last one reach this share of the records in it. Then the cost of writing
# per record is constant, and folding the records after the last one takes about as long as restoring it.
GROWTH = 1 / 8


class SnapshotWriter:
    """Writes snapshots of a plan into its store, each from a thread of its own."""

    def __init__(self, store: Journal, plan: SearchPlan) -> None:
        self._store = store
        self._plan = plan
        self._last = plan.restored  # records in the last snapshot, as far as this driver knows
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hpstage-snapshot")
        self._writing: Future[None] | None = None

    def write_if_due(self) -> None:
        """Write a snapshot of the plan as it is now, if enough records were added since the last one."""
        position = self._plan.position
        if position - self._last < max(LEAST, GROWTH * self._last):
            return
        if self._writing is not None and not self._writing.done():
            return
        self._last = position
        from hpstage.plan.snapshot import snapshot_of  # builds the decoders of all columns, which few searches need

        try:
            content = snapshot_of(self._plan)
        except StoreError as error:
            logger.info("No snapshot of the plan: %s", error)
            return
        self._writing = self._pool.submit(self._write, content)

    def close(self) -> None:
        """Wait until the last snapshot is written."""
        self._pool.shutdown()

    def _write(self, content: bytes) -> None:
        try:
            self._store.write_snapshot(content)
        except StoreError as error:
            logger.info("The snapshot of the plan was not written: %s", error)
