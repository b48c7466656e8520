"""Workers: which are idle, what each one trains, and which states it holds, as one driver knows. Pure."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hpstage.errors import InternalError
from hpstage.plan.facts import ChainId, StateRef, WorkerId
from hpstage.plan.messages import host_of
from hpstage.plan.step_times import ALONE, StepTimes
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
    host: WorkerId  # itself, or the worker of which it is a slot
    number: int  # in the order of joining
    others: int = 0  # chains that its host trains or will train in earlier slots; set by Workers.idle()
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

    def is_ready(self, now: float) -> bool:
        """Whether the worker can be given a chain."""
        return self.chain is None and self.back_at <= now


class Workers(dict[WorkerId, Worker]):
    """The present workers by id. The methods used in every turn cost the same, however many workers are busy.

    Args:
        slots: maximum number of chains that a worker may train side by side; ``None``: as many as it has slots.
    """

    def __init__(self, slots: int | None = None) -> None:
        super().__init__()
        self._slots = sys.maxsize if slots is None else slots
        self.most = 0  # largest number present at one time, not counting slots
        self.set_step_times(ALONE)
        self._joined = 0
        self._of_host: dict[WorkerId, dict[WorkerId, Worker]] = {}  # the slots of each host
        self._free: dict[WorkerId, Worker] = {}  # those without a chain
        self._benched: dict[WorkerId, Worker] = {}  # those benched that have not used the checkpoints since
        self._busy: Counter[WorkerId] = Counter()  # how many chains each host trains

    def join(self, id: WorkerId) -> Worker:
        if id in self:
            raise InternalError(f"worker {id} joined twice")
        self._joined += 1
        worker = self[id] = self._free[id] = Worker(id, host_of(id), self._joined)
        slots = self._of_host.setdefault(worker.host, {})
        other = next(iter(slots.values()), None)
        if other is not None:
            worker.live = other.live  # they are one process
        slots[id] = worker
        self.most = max(self.most, self.hosts)
        return worker

    def leave(self, id: WorkerId) -> None:
        worker = self.pop(id, None)
        if worker is None:
            return
        self.assign(worker, None)
        del self._free[id]
        self._benched.pop(id, None)
        slots = self._of_host[worker.host]
        del slots[id]
        if not slots:
            del self._of_host[worker.host]

    def assign(self, worker: Worker, chain: ChainId | None) -> None:
        """Record which chain runs on a worker, if any."""
        busy = (chain is not None) - (worker.chain is not None)
        worker.chain = chain
        if busy > 0:
            self._busy[worker.host] += 1
            del self._free[worker.id]
        elif busy < 0:
            self._busy[worker.host] -= 1
            if not self._busy[worker.host]:
                del self._busy[worker.host]
            self._free[worker.id] = worker

    def idle(self, now: float) -> list[Worker]:
        """Return the idle workers, slots of the least loaded hosts first; of each host, only as many as pay side by
        side."""
        if not self._free:
            return []
        chains: dict[WorkerId, int] = {}
        ready = []
        for worker in sorted(self._free.values(), key=lambda worker: worker.number):
            already = chains.get(worker.host, self._busy[worker.host])
            if worker.is_ready(now) and already < self._widest:
                worker.others = already
                chains[worker.host] = already + 1
                ready.append(worker)
        return sorted(ready, key=lambda worker: worker.others)

    @property
    def hosts(self) -> int:
        """The number of workers, not counting slots."""
        return len(self._of_host)

    def chains(self) -> Mapping[WorkerId, int]:
        """Return how many chains each busy host trains."""
        return self._busy

    def last_chain(self, host: WorkerId) -> ChainId | None:
        """Return the chain of a host's last slot that has one."""
        slots = self._of_host.get(host, {}).values()
        return next((slot.chain for slot in reversed(slots) if slot.chain is not None), None)

    def set_step_times(self, measured: StepTimes) -> None:
        """Set the step times of chains side by side, which determine how many of them a host may train."""
        self.step_times = measured
        self._widest = measured.allowed(self._slots)

    def surplus(self) -> Iterator[ChainId]:
        """Yield the chains that hosts train beyond the number that pays side by side."""
        for host, busy in self._busy.items():
            if busy > self._widest:
                chains = [slot.chain for slot in self._of_host[host].values() if slot.chain is not None]
                yield from chains[self._widest :]

    def set_speeds(self, running: Iterable[Orders]) -> None:
        """Set the speeds of chains that are trained side by side: each is slower than by itself."""
        for orders in running:
            if not orders.chain.gang:
                orders.speed = 1.0 / self.step_times.slowness(max(1, self._busy[host_of(orders.chain.worker)]))

    def bench(self, id: WorkerId, trouble: str, now: float) -> list[str]:
        """Bench a worker that cannot use the checkpoints, and return messages for the user."""
        worker = self.get(id)
        if worker is None:
            return []
        first, longest = _BENCHED
        seconds = min(first * 2.0 ** min(worker.benched, 30), longest)
        known, worker.trouble = worker.trouble, trouble
        worker.benched, worker.back_at = worker.benched + 1, now + seconds
        self._benched[id] = worker
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
        worker.benched, worker.back_at, worker.trouble = 0, 0.0, ""
        del self._benched[id]
        return [f"Worker {id} can use the checkpoints again."]

    def able(self, now: float) -> int:
        """Return the number of workers that are not benched, counting the slots that each host may use."""
        if len(self) == self.hosts and self._widest >= 1:  # no slots
            return len(self) - sum([worker.back_at > now for worker in self._benched.values()])
        slots = Counter(worker.host for worker in self.values() if worker.back_at <= now)
        return sum(min(count, self._widest) for count in slots.values())

    def strength(self) -> float:
        """Return the number of workers with one chain at a time that would train as fast as these."""
        used = [min(len(slots), self._widest) for slots in self._of_host.values()]
        return sum(1.0 / self.step_times.share(count) for count in used)

    def back_at(self, now: float) -> float | None:
        """Return when the next benched worker is tried again, or ``None`` if none is benched."""
        if not self._benched:
            return None
        return min((worker.back_at for worker in self._benched.values() if worker.back_at > now), default=None)

    def trouble(self) -> str | None:
        """Return why no worker can use the checkpoints, or ``None`` if any can."""
        if not self._benched or len(self._benched) < len(self):
            return None
        return min(self._benched.values(), key=lambda worker: worker.number).trouble
