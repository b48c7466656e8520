"""Inquest: before a state is written off that a worker could not read, the driver reads it itself.

A worker that alone does not see a state has a missing mount, a stale cache or bad memory: it is the worker that is
written off, for a while. The end of its chain is held back meanwhile, as if it ran on, so that no other begins there.
"""

from __future__ import annotations

import queue
import threading

from msgspec.structs import replace

from hpstage.checkpoints import CheckpointStore
from hpstage.checkpoints.state_tree import flatten
from hpstage.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing
from hpstage.plan.facts import ChainId, StateKey
from hpstage.plan.messages import ChainEnded


class Inquest:
    """Reads what workers could not, each in a thread of its own: reading takes as long as the state is large, and for
    ever where a server does not answer."""

    def __init__(self, checkpoints: CheckpointStore) -> None:
        self._checkpoints = checkpoints
        self._decided: queue.SimpleQueue[ChainEnded] = queue.SimpleQueue()
        self.held: set[ChainId] = set()

    def hold(self, report: ChainEnded, key: StateKey) -> None:
        """Hold a report back until it is clear what it means."""
        self.held.add(report.chain)
        threading.Thread(target=self._look, args=(report, key), name="hpstage-inquest", daemon=True).start()

    def decided(self) -> list[ChainEnded]:
        """Reports as they are to be understood: ``unreadable`` for everybody, or the worker is ``cut_off``."""
        reports = []
        while not self._decided.empty():
            reports.append(self._decided.get())
            self.held.discard(reports[-1].chain)
        return reports

    def names(self, key: StateKey) -> list[str]:
        """Names of the leaves of a state; none if it cannot be read."""
        try:
            return [leaf.name for leaf in flatten(self._checkpoints.load(key)).leaves]
        except CheckpointError:
            return []

    def _look(self, report: ChainEnded, key: StateKey) -> None:
        try:
            self._checkpoints.verify(key)
        except (CheckpointMissing, CheckpointCorrupt):
            self._decided.put(report)
        except Exception as error:  # whatever it is, it is no proof; and a report that stays held back is a hang
            message = f"{report.message}; the driver cannot tell whether that is so ({error})"
            self._decided.put(replace(report, outcome="cut_off", message=message))
        else:
            message = (
                f"{report.message}, though the driver finds it there and sound; see that the same place is mounted"
            )
            self._decided.put(replace(report, outcome="cut_off", message=message))
