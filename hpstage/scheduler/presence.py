"""How long workers were present: what is paid for them, whether they train or not. Pure."""

from __future__ import annotations

from hpstage.plan.facts import WorkerId
from hpstage.plan.messages import host_of


class Presence:
    """The times that workers joined, and the seconds of those that have left. The lanes of one are one."""

    def __init__(self) -> None:
        self._since: dict[WorkerId, float] = {}
        self._past = 0.0

    def join(self, worker: WorkerId, at: float) -> None:
        self._since.setdefault(host_of(worker), at)

    def leave(self, worker: WorkerId, at: float) -> None:
        since = self._since.pop(host_of(worker), at)  # of the first lane to leave: they leave together
        self._past += max(0.0, at - since)

    def seconds(self, now: float) -> float:
        """Return the seconds of all workers up to ``now``."""
        return self._past + sum(max(0.0, now - since) for since in self._since.values())
