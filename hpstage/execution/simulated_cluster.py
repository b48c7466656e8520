"""Simulated workers on one virtual clock, shared by the executors of one or several searches. Workers join, fail and
leave, and follow the demand of the searches; their seconds are counted."""

from __future__ import annotations

import heapq
import math
import random
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import count
from typing import Protocol

from hpstage.errors import InternalError, UsageError
from hpstage.plan.facts import StateKey, WorkerId
from hpstage.plan.messages import Report, WorkerJoined, WorkerLeft, host_of, names_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Disruptions:
    """Slow and lost workers of a simulated cluster. What happens to a worker depends on its number alone.

    Attributes:
        slow: the share of workers whose steps take ``slowdown`` times as long.
        lifetime_seconds: mean time until a worker is taken away, like a spot instance; exponentially distributed. By
            default, no worker is taken away.
        notice_seconds: time from a worker's notice to its end. At the notice, it saves its chains' states and leaves.
        replace_seconds: time until a new worker replaces one that is gone, if the cluster has no ``scaling``.
        seed: seed of all random draws.
    """

    slow: float = 0.0
    slowdown: float = 3.0
    lifetime_seconds: float = math.inf
    notice_seconds: float = 0.0
    replace_seconds: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.slow <= 1.0:
            raise UsageError(f"slow is {self.slow!r}; it is a share of the workers, from 0 to 1")
        if not 1.0 <= self.slowdown < math.inf:
            raise UsageError(f"slowdown is {self.slowdown!r}; it must be at least 1")
        if not self.lifetime_seconds > 0.0:
            raise UsageError(f"lifetime_seconds is {self.lifetime_seconds!r}; it must be above zero")
        for name, seconds in (("notice_seconds", self.notice_seconds), ("replace_seconds", self.replace_seconds)):
            if not 0.0 <= seconds < math.inf:
                raise UsageError(f"{name} is {seconds!r}; it must be a number of seconds, at least zero")

    def of(self, number: int) -> Fate:
        drawn = random.Random(f"{self.seed}/{number}")
        slow, part = drawn.random() < self.slow, drawn.expovariate(1.0)
        lifetime = math.inf if self.lifetime_seconds == math.inf else part * self.lifetime_seconds
        return Fate(self.slowdown if slow else 1.0, lifetime)


@dataclass(frozen=True, slots=True)
class Scaling:
    """How simulated workers follow the demand.

    Attributes:
        minimum, maximum: limits of the number of workers.
        start_seconds: time from the request for a worker until it joins.
        interval: seconds between two comparisons with the demand.
    """

    minimum: int
    maximum: int
    start_seconds: float
    interval: float = 1.0


@dataclass(frozen=True, slots=True)
class Fate:
    """The fate of a worker: the factor by which its steps are slower, and the seconds after which it is taken away."""

    slowness: float = 1.0
    lifetime: float = math.inf


class Member(Protocol):
    """An executor that trains on the cluster."""

    inbox: list[Report]
    """Reports that the executor receives next."""

    def trains_on(self, slots: Iterable[WorkerId]) -> bool: ...

    def release(self, slots: Sequence[WorkerId]) -> None:
        """Let the chains on these slots stop at their next steps, with their states kept."""

    def lose(self, slots: Sequence[WorkerId]) -> None:
        """Drop the chains on these slots."""


@dataclass(eq=False, repr=False)
class SimulatedCluster:
    """A cluster of simulated workers on a virtual clock."""

    workers: int  # number of workers at the beginning
    _: KW_ONLY
    slots: int = 1  # maximum number of chains that a worker trains side by side
    scaling: Scaling | None = None  # lets workers come and go with the demand
    disruptions: Disruptions | None = None  # slows workers down, and takes them away

    def __post_init__(self) -> None:
        self.pool = f"simulated/{uuid.uuid4().hex}"
        self.now = 0.0
        self.live: dict[WorkerId, StateKey | None] = {}
        """The state that each present slot holds."""
        self.most = 0
        """Maximum number of workers allocated at a time."""
        self._members: list[Member] = []
        self._order = count()
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._woken = False
        self._numbers = count()
        self._fates: dict[WorkerId, Fate] = {}
        self._leaving: set[WorkerId] = set()  # workers that got a notice and still train
        self._expected: set[WorkerId] = set()  # workers that will join
        self._allocated = 0.0
        self._allocated_since: dict[WorkerId, float] = {}  # by worker that is present or requested
        self._demands: list[Callable[[float, float], int]] = []
        self._looking = False  # the next comparison with the demand is on the agenda
        for _ in range(self.workers):
            self.join(0.0)

    # --- executors and time -------------------------------------------------------------------------------

    def attach(self, member: Member) -> None:
        """Let an executor train on the workers, and report those that are present."""
        if self._members and self.slots > 1:
            raise InternalError("simulated workers with several slots can be used by one executor only")
        self._members.append(member)
        member.inbox += [WorkerJoined(slot, self.now) for slot in self.live]

    def detach(self, member: Member) -> None:
        if member in self._members:
            self._members.remove(member)
        if not self._members:
            self._agenda.clear()

    def at(self, after: float, act: Callable[[], object]) -> None:
        """Call ``act`` in ``after`` seconds."""
        heapq.heappush(self._agenda, (self.now + after, next(self._order), act))

    def wake(self) -> None:
        """Stop the clock after all events of the present time, as if something had been reported."""
        self._woken = True

    def advance(self, timeout: float | None) -> None:
        """Advance the clock until something is reported to any executor; not at all with a ``timeout`` of zero."""
        self._look()
        while self._agenda and (self._agenda[0][0] <= self.now or (timeout != 0.0 and not self._has_reports())):
            self.now, _, act = heapq.heappop(self._agenda)
            act()
        if timeout and not self._has_reports():
            self.now += timeout  # the agenda is empty: the caller only lets time pass
        self._woken = False

    def _has_reports(self) -> bool:
        return self._woken or any(member.inbox for member in self._members)

    def _report(self, *reports: Report) -> None:
        for member in self._members:
            member.inbox += reports

    # --- workers ------------------------------------------------------------------------------------------

    def join(self, after: float) -> WorkerId:
        """Let a new worker join ``after`` seconds from now."""
        number = next(self._numbers)
        worker = WorkerId(f"sim-{number}")
        self._fates[worker] = Fate() if self.disruptions is None else self.disruptions.of(number)
        self._expected.add(worker)
        self._allocated_since[worker] = self.now
        self.most = max(self.most, len(self._allocated_since))
        self.at(after, lambda: self._come(worker))
        return worker

    def _come(self, worker: WorkerId) -> None:
        if worker not in self._expected:
            return  # no longer needed
        self._expected.remove(worker)
        slots = names_of(worker, self.slots)
        self.live |= dict.fromkeys(slots)
        self._report(*[WorkerJoined(slot, self.now) for slot in slots])
        lifetime = self._fates[worker].lifetime
        if self.disruptions is not None and lifetime < math.inf:
            notice = min(lifetime, self.disruptions.notice_seconds)
            if notice:
                self.at(lifetime - notice, lambda: self._notify(worker))
            self.at(lifetime, lambda: self._die(worker))

    def _notify(self, worker: WorkerId) -> None:
        """Give a worker the notice that it will be taken away."""
        slots = names_of(worker, self.slots)
        if worker not in self.live:
            return
        if not self.trains(worker):
            self._depart(worker)
            return
        self._leaving.add(worker)
        for member in self._members:
            member.release(slots)

    def chain_ended(self, worker: WorkerId) -> None:
        """Let a worker leave if it has only been waiting for the end of its chains."""
        host = host_of(worker)
        if host in self._leaving and not self.trains(host):
            self._depart(host)

    def _depart(self, worker: WorkerId) -> None:
        self._remove(worker)
        self._report(*[WorkerLeft(slot, self.now, "closed") for slot in names_of(worker, self.slots)])
        self._replace()

    def _replace(self) -> None:
        if self.disruptions is not None and self.scaling is None:
            self.join(self.disruptions.replace_seconds)

    def _leave(self, worker: WorkerId) -> None:
        """Let an idle worker leave, or cancel a worker that has not joined yet."""
        if self.trains(worker):
            raise InternalError(f"{worker} is training and must not leave")
        reports = [WorkerLeft(slot, self.now, "closed") for slot in names_of(worker, self.slots) if slot in self.live]
        self._remove(worker)
        self.at(0.0, lambda: self._report(*reports))

    def kill(self, worker: WorkerId, after: float) -> None:
        """Let a worker die ``after`` seconds from now, with the chains it runs."""
        self.at(after, lambda: self._die(worker))

    def _die(self, worker: WorkerId) -> None:
        if worker not in self.live:
            return
        slots = names_of(worker, self.slots)
        self._remove(worker)
        self._report(*[WorkerLeft(slot, self.now) for slot in slots])
        for member in self._members:
            member.lose(slots)
        self._replace()

    def _remove(self, worker: WorkerId) -> None:
        self._allocated += self.now - self._allocated_since.pop(worker)
        self._expected.discard(worker)
        self._leaving.discard(worker)
        for slot in names_of(worker, self.slots):
            self.live.pop(slot, None)

    def busy(self, slots: Collection[WorkerId]) -> bool:
        return any(member.trains_on(slots) for member in self._members)

    def trains(self, worker: WorkerId) -> bool:
        return self.busy(names_of(worker, self.slots))

    def slowness(self, slots: Iterable[WorkerId]) -> float:
        """Return the factor by which a step takes longer when these slots train it together."""
        return max(self._fates[host_of(slot)].slowness for slot in slots)

    # --- demand and costs ---------------------------------------------------------------------------------

    def follow(self, demand: Callable[[float, float], int]) -> None:
        """Let the number of workers follow this demand, in addition to earlier ones."""
        self._demands.append(demand)

    def _look(self) -> None:
        """Compare the workers with the demand, now and periodically as long as anything runs."""
        scaling = self.scaling
        if scaling is None or self._looking or not self._demands:
            return
        demand = sum(demand(self.now, scaling.start_seconds) for demand in self._demands)
        surplus = len(self._allocated_since) - min(scaling.maximum, max(scaling.minimum, demand))
        for _ in range(-surplus):
            self.join(scaling.start_seconds)
        if surplus > 0:
            starting = [worker for worker in self._allocated_since if worker not in self.live]
            idle = [worker for worker in self.live if worker == host_of(worker) and not self.trains(worker)]
            for worker in [*reversed(starting), *idle][:surplus]:
                self._leave(worker)
        if self._agenda:
            self._looking = True
            self.at(scaling.interval, self._look_again)

    def _look_again(self) -> None:
        self._looking = False
        self._look()

    @property
    def paid_seconds(self) -> float:
        """The seconds of all workers, each from its request until it left, or until now if it has not left."""
        return self._allocated + sum(self.now - since for since in self._allocated_since.values())
