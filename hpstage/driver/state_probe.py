"""StateProbe: the driver checks a state that a worker could not read before the state is given up.

If only one worker cannot read it, that worker has a missing mount, a stale cache or bad memory, and is benched instead.
Until that is known, the end of its chain is held back as if it still ran, so that no other chain begins there.
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


class StateProbe:
    """Reads states that workers could not read, each in a separate thread: reading takes time in proportion to the
    state's size, and blocks forever if a server does not answer."""

    def __init__(self, checkpoints: CheckpointStore) -> None:
        self._checkpoints = checkpoints
        self._decided: queue.SimpleQueue[ChainEnded] = queue.SimpleQueue()
        self.held: set[ChainId] = set()

    def hold(self, report: ChainEnded, key: StateKey) -> None:
        """Hold back a report until the cause is known."""
        self.held.add(report.chain)
        threading.Thread(target=self._look, args=(report, key), name="hpstage-probe", daemon=True).start()

    def decided(self) -> list[ChainEnded]:
        """Return decided reports: the state is ``unreadable`` for all workers, or this worker is ``cut_off``."""
        reports = []
        while not self._decided.empty():
            reports.append(self._decided.get())
            self.held.discard(reports[-1].chain)
        return reports

    def names(self, key: StateKey) -> list[str]:
        """Return the names of a state's leaves, or none if it cannot be read."""
        try:
            return [leaf.name for leaf in flatten(self._checkpoints.load(key)).leaves]
        except CheckpointError:
            return []

    def _look(self, report: ChainEnded, key: StateKey) -> None:
        try:
            self._checkpoints.verify(key)
        except (CheckpointMissing, CheckpointCorrupt):
            self._decided.put(report)
        except Exception as error:  # no evidence about the state; a report held back forever would hang the search
            message = f"{report.message}; the driver cannot check it ({error})"
            self._decided.put(replace(report, outcome="cut_off", message=message))
        else:
            message = (
                f"{report.message}, though the driver finds it there and sound; see that the worker has the same place "
                f"mounted, and the same hpstage installed"
            )
            self._decided.put(replace(report, outcome="cut_off", message=message))
