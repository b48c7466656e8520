"""The workers of an executor, as one driver knows them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpstage.plan.facts import ChainId, StateRef, WorkerId

# States that a worker may still hold live; only a preference hangs on it.
_REMEMBERED = 64
# Seconds for which a worker is benched at first and at most; twice as long each time in a row.
_BENCHED = (1.0, 60.0)


@dataclass(slots=True)
class Worker:
    """What runs on a worker, which states it may hold live, and whether it can use the checkpoints.

    One that cannot is *benched*: it is given no chain for a while, and then tried again.
    """

    id: WorkerId
    chain: ChainId | None = None  # that runs there, this driver's or another's
    live: dict[StateRef, None] = field(default_factory=dict)
    benched: int = 0  # times in a row
    back_at: float = 0.0  # when it is tried again
    trouble: str = ""  # why it was benched

    def remember(self, ref: StateRef) -> None:
        self.live.pop(ref, None)
        self.live[ref] = None
        if len(self.live) > _REMEMBERED:
            del self.live[next(iter(self.live))]

    def bench(self, trouble: str, now: float) -> float:
        """Give it no chain for a while; the seconds."""
        first, longest = _BENCHED
        seconds = min(first * 2.0 ** min(self.benched, 30), longest)
        self.benched, self.back_at, self.trouble = self.benched + 1, now + seconds, trouble
        return seconds

    def unbench(self) -> None:
        self.benched, self.back_at, self.trouble = 0, 0.0, ""

    def is_ready(self, now: float) -> bool:
        """May it be given a chain?"""
        return self.chain is None and self.back_at <= now
