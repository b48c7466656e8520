"""One driver's view of its executor's workers. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from hpstage.errors import InternalError
from hpstage.plan.facts import ChainId, StateRef, WorkerId
from hpstage.plan.messages import host_of
from hpstage.plan.step_times import StepTimes
from hpstage.scheduler.orders import Orders

# Remembered states that a worker may still hold live; they only affect a preference.
_REMEMBERED = 64
# Initial and maximum seconds for which a worker is benched; doubled each time in a row.
_BENCHED = (1.0, 60.0)


@dataclass(slots=True)
class Worker:
    """The chain running on a worker, the states it may hold live, and whether it can use the checkpoints.

    A worker that cannot is *benched*: it gets no chain for a while and is then tried again.
    """

    id: WorkerId
    host: WorkerId  # itself, or the worker of which it is a lane
    beside: int = 0  # chains that the host trains, and will in lanes before this one; set by Workers.idle()
    chain: ChainId | None = None  # running there, this driver's or another's
    live: dict[StateRef, None] = field(default_factory=dict)
    benched: int = 0  # consecutive times
    back_at: float = 0.0  # when it is tried again
    trouble: str = ""  # why it was benched

    def remember(self, ref: StateRef) -> None:
        self.live.pop(ref, None)
        self.live[ref] = None
        if len(self.live) > _REMEMBERED:
            del self.live[next(iter(self.live))]

    def bench(self, trouble: str, now: float) -> float:
        """Bench the worker, and return for how many seconds."""
        first, longest = _BENCHED
        seconds = min(first * 2.0 ** min(self.benched, 30), longest)
        self.benched, self.back_at, self.trouble = self.benched + 1, now + seconds, trouble
        return seconds

    def unbench(self) -> None:
        self.benched, self.back_at, self.trouble = 0, 0.0, ""

    def is_ready(self, now: float) -> bool:
        """Whether the worker can be given a chain."""
        return self.chain is None and self.back_at <= now


class Workers(dict[WorkerId, Worker]):
    """The present workers by id.

    Args:
        lanes: the most chains that one may train side by side; ``None``: as many as it has lanes.
    """

    def __init__(self, lanes: int | None = None) -> None:
        super().__init__()
        self._lanes = math.inf if lanes is None else lanes
        self.most = 0  # largest number present at one time, not counting lanes
        self.step_times: StepTimes | None = None  # of chains side by side; without them, all lanes are used

    def join(self, id: WorkerId) -> Worker:
        if id in self:
            raise InternalError(f"worker {id} joined twice")
        worker = Worker(id, host_of(id))
        beside = next((other for other in self.values() if other.host == worker.host), None)
        if beside is not None:
            worker.live = beside.live  # they are one process
        self[id] = worker
        self.most = max(self.most, self.hosts)
        return worker

    def idle(self, now: float) -> list[Worker]:
        """Return the workers that can be given a chain; lanes of the hosts that train the fewest chains first, and of
        each host no more than it pays to train side by side."""
        beside = self.chains()
        ready = []
        for worker in self.values():
            if worker.is_ready(now) and beside[worker.host] < self._widest:
                worker.beside = beside[worker.host]
                beside[worker.host] += 1
                ready.append(worker)
        return sorted(ready, key=lambda worker: worker.beside)

    @property
    def hosts(self) -> int:
        """The number of workers, not counting lanes."""
        return len({worker.host for worker in self.values()})

    def chains(self) -> Counter[WorkerId]:
        """Return how many chains each host trains."""
        return Counter(worker.host for worker in self.values() if worker.chain is not None)

    @property
    def _widest(self) -> float:
        return self._lanes if self.step_times is None else min(self._lanes, self.step_times.best)

    def set_speeds(self, running: Iterable[Orders]) -> None:
        """Tell chains that are trained side by side that they are slower than alone."""
        if self.step_times is None:
            return
        beside = self.chains()
        for orders in running:
            if not orders.chain.gang:
                orders.speed = 1.0 / self.step_times.slowness(max(1, beside[host_of(orders.chain.worker)]))

    def bench(self, id: WorkerId, trouble: str, now: float) -> list[str]:
        """Bench a worker that cannot use the checkpoints, and return messages for the user."""
        worker = self.get(id)
        if worker is None:
            return []
        known = worker.trouble
        seconds = worker.bench(trouble, now)
        if known == trouble:
            return []
        return [
            f"Worker {id} cannot use the checkpoints: {trouble}. It is given no work for {seconds:.0f} s, and then "
            f"tried again; no progress is lost."
        ]

    def unbench(self, id: WorkerId) -> list[str]:
        """Unbench a worker that has used the checkpoints, and return messages for the user."""
        worker = self.get(id)
        if worker is None or not worker.benched:
            return []
        worker.unbench()
        return [f"Worker {id} can use the checkpoints again."]

    def able(self, now: float) -> int:
        """Return the number of workers that are not benched: of a host's lanes, those that are used."""
        lanes = Counter(worker.host for worker in self.values() if worker.back_at <= now)
        return sum(int(min(count, self._widest)) for count in lanes.values())

    def strength(self) -> float:
        """Return how many workers that train one chain at a time would train as much as these can."""
        lanes = Counter(worker.host for worker in self.values())
        used = [int(min(count, self._widest)) for count in lanes.values()]
        return sum(used) if self.step_times is None else sum(1.0 / self.step_times.share(count) for count in used)

    def back_at(self, now: float) -> float | None:
        """Return when the next benched worker is tried again, or ``None`` if none is benched."""
        return min((worker.back_at for worker in self.values() if worker.back_at > now), default=None)

    def trouble(self) -> str | None:
        """Return why no worker can use the checkpoints, or ``None`` if any can."""
        troubles = [worker.trouble for worker in self.values() if worker.benched]
        return troubles[0] if troubles and len(troubles) == len(self) else None
