"""The workers that drivers have had, and for how long: allocated worker time, idle or not. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hpstage.plan.facts import DriverId, WorkerId, WorkersChanged
from hpstage.plan.messages import host_of


@dataclass(slots=True)
class _Present:
    """The drivers that have a worker, and the time up to which its seconds are counted."""

    drivers: list[DriverId]
    since: float


class Presence:
    """The workers that drivers have now, and the seconds for which they have had workers.

    A worker is present from when its driver recorded that it joined until it recorded that it left, or until the driver
    is found to be gone. The slots of a worker count as one worker. While several drivers have a worker, each is charged
    an equal share of it, so that the studies' sums add up to the plan's. Journals of earlier builds do not record which
    workers joined: there, a worker is present from its first chain on.
    """

    def __init__(self) -> None:
        self.now = -math.inf
        """The latest time reported on the workers' clock."""
        self._present: dict[tuple[str, WorkerId], _Present] = {}  # by pool and name
        self._pools: dict[DriverId, dict[WorkerId, str]] = {}  # the pool of each worker that a driver has
        self._seconds: dict[DriverId, float] = {}
        self._studies: dict[DriverId, str] = {}
        self._most: dict[DriverId | None, int] = {}  # most workers at a time; None: of all drivers

    def advance(self, at: float) -> None:
        if at > self.now:
            self.now = at

    def change(self, fact: WorkersChanged) -> None:
        self.advance(fact.at)
        for worker in fact.joined:
            self._join(fact.driver, fact.pool, host_of(worker), fact.at)
        for worker in fact.left:
            self._leave(fact.driver, host_of(worker), fact.at)

    def work(self, driver: DriverId, pool: str, workers: Iterable[WorkerId], at: float) -> None:
        """Record that a driver has these workers, whether or not it has recorded them itself."""
        self.advance(at)
        for worker in workers:
            self._join(driver, pool, host_of(worker), at)

    def end(self, driver: DriverId) -> None:
        """Record that a driver is gone: its workers were present until the last report."""
        for worker in list(self._pools.get(driver, ())):
            self._leave(driver, worker, self.now)
        self._pools.pop(driver, None)

    def serve(self, driver: DriverId, study: str) -> None:
        """Record for which study a driver works."""
        self._studies[driver] = study

    def drivers_of(self, study: str | None) -> set[DriverId]:
        """Return the drivers whose current or last study this is; ``None``: of all studies."""
        return {driver for driver, served in self._studies.items() if study in (None, served)}

    def most(self, drivers: Iterable[DriverId] | None = None) -> int:
        """Return the largest number of workers present at a time, of any one of these drivers or of all together."""
        return max((self._most.get(driver, 0) for driver in ((None,) if drivers is None else drivers)), default=0)

    def seconds(self, study: str | None = None) -> float:
        """Return the seconds of the workers up to now, of all drivers or of those of a study."""
        known = [seconds for driver, seconds in self._seconds.items() if study in (None, self._studies.get(driver))]
        for worker in self._present.values():
            mine = sum(study in (None, self._studies.get(driver)) for driver in worker.drivers)
            known.append(max(0.0, self.now - worker.since) * mine / len(worker.drivers))
        return math.fsum(known)

    def _join(self, driver: DriverId, pool: str, worker: WorkerId, at: float) -> None:
        mine = self._pools.setdefault(driver, {})
        if worker in mine:
            return
        mine[worker] = pool
        present = self._present.setdefault((pool, worker), _Present([], at))
        self._count(present, at)
        present.drivers.append(driver)
        self._most[driver] = max(self._most.get(driver, 0), len(mine))
        self._most[None] = max(self._most.get(None, 0), len(self._present))

    def _leave(self, driver: DriverId, worker: WorkerId, at: float) -> None:
        pool = self._pools.get(driver, {}).pop(worker, None)
        if pool is None:
            return  # it has left before, with its first slot or its driver
        present = self._present[pool, worker]
        self._count(present, at)
        present.drivers.remove(driver)
        if not present.drivers:
            del self._present[pool, worker]

    def _count(self, worker: _Present, at: float) -> None:
        """Count a worker's seconds up to a time, which may be earlier than the last one: drivers report at any time."""
        for driver in worker.drivers:
            self._seconds[driver] = self._seconds.get(driver, 0.0) + max(0.0, at - worker.since) / len(worker.drivers)
        worker.since = max(worker.since, at)
