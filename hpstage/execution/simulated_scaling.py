"""Simulated workers that come and go with the demand of a search, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hpstage.plan.facts import WorkerId


class Fleet(Protocol):
    """The simulated workers, and their time."""

    def clock(self) -> float: ...

    def join(self, after: float) -> WorkerId: ...

    def leave(self, worker: WorkerId) -> None: ...

    def is_present(self, worker: WorkerId) -> bool: ...

    def idle_workers(self) -> list[WorkerId]: ...

    def later(self, after: float, act: Callable[[], None]) -> bool: ...


@dataclass(frozen=True, slots=True)
class Scaling:
    """How simulated workers follow the demand.

    Attributes:
        minimum, maximum: limits of the number of workers.
        start_seconds: time from when a worker is asked for until it joins.
        interval: seconds between two looks at the demand.
    """

    minimum: int
    maximum: int
    start_seconds: float
    interval: float = 1.0


class Scaler:
    """Asks for workers, and lets those leave that are not needed."""

    def __init__(self, scaling: Scaling, fleet: Fleet) -> None:
        self.scaling = scaling
        self._fleet = fleet
        self._demand: Callable[[float, float], int] | None = None
        self._looking = False
        self._asked: dict[WorkerId, float] = {}  # workers not paid yet, with the times since which they are paid for
        self._paid = 0.0
        self.most = 0

    def follow(self, demand: Callable[[float, float], int]) -> None:
        self._demand = demand

    def add(self, worker: WorkerId) -> None:
        self._asked[worker] = self._fleet.clock()
        self.most = max(self.most, len(self._asked))

    def remove(self, worker: WorkerId) -> None:
        self._paid += self._fleet.clock() - self._asked.pop(worker)

    @property
    def paid_seconds(self) -> float:
        """The seconds of all workers, from when each was asked for."""
        return self._paid + sum(self._fleet.clock() - since for since in self._asked.values())

    def look(self) -> None:
        """Compare the workers with the demand, now and again as long as anything is going on."""
        if self._looking or self._demand is None:
            return
        self._compare(self._demand(self._fleet.clock(), self.scaling.start_seconds))
        self._looking = self._fleet.later(self.scaling.interval, self._again)

    def _again(self) -> None:
        self._looking = False
        self.look()

    def _compare(self, demand: int) -> None:
        wanted = min(self.scaling.maximum, max(self.scaling.minimum, demand))
        surplus = len(self._asked) - wanted
        for _ in range(-surplus):
            self._fleet.join(self.scaling.start_seconds)
        if surplus > 0:
            starting = [worker for worker in self._asked if not self._fleet.is_present(worker)]
            for worker in [*reversed(starting), *self._fleet.idle_workers()][:surplus]:
                self._fleet.leave(worker)
