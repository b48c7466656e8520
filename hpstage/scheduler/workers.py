"""The workers of an executor, as one driver knows them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpstage.errors import InternalError
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


class Workers(dict[WorkerId, Worker]):
    """Those that are there, by their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0  # that were there at one time

    def join(self, id: WorkerId) -> Worker:
        if id in self:
            raise InternalError(f"worker {id} joined twice")
        worker = self[id] = Worker(id)
        self.most = max(self.most, len(self))
        return worker

    def bench(self, id: WorkerId, trouble: str, now: float) -> list[str]:
        """A worker cannot use the checkpoints; returns what people are told."""
        worker = self.get(id)
        if worker is None:
            return []
        known = worker.trouble
        seconds = worker.bench(trouble, now)
        if known == trouble:
            return []
        return [
            f"Worker {id} cannot use the checkpoints: {trouble}. It is given no work for {seconds:.0f} s, then tried "
            f"again and again; nothing is lost by it."
        ]

    def unbench(self, id: WorkerId) -> list[str]:
        """A worker has used the checkpoints; returns what people are told."""
        worker = self.get(id)
        if worker is None or not worker.benched:
            return []
        worker.unbench()
        return [f"Worker {id} can use the checkpoints again."]

    def able(self, now: float) -> int:
        """How many are not benched."""
        return sum(worker.back_at <= now for worker in self.values())

    def back_at(self, now: float) -> float | None:
        """When the next benched worker is tried again; ``None`` if none is benched."""
        return min((worker.back_at for worker in self.values() if worker.back_at > now), default=None)

    def trouble(self) -> str | None:
        """Why no worker can use the checkpoints, if none can."""
        troubles = [worker.trouble for worker in self.values() if worker.benched]
        return troubles[0] if troubles and len(troubles) == len(self) else None
