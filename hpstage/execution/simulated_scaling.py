"""Simulated workers that come and go with the demand of searches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpstage.plan.facts import WorkerId


class Fleet(Protocol):
    """The simulated workers, and their time."""

    now: float

    @property
    def requested(self) -> Sequence[WorkerId]: ...

    def join(self, after: float) -> WorkerId: ...

    def leave(self, worker: WorkerId) -> None: ...

    def is_present(self, worker: WorkerId) -> bool: ...

    def idle_workers(self) -> list[WorkerId]: ...

    def later(self, after: float, act: Callable[[], object]) -> bool: ...


@dataclass(frozen=True, slots=True)
class Scaling:
    """How simulated workers follow the demand.

    Attributes:
        minimum, maximum: limits of the number of workers.
        start_seconds: time from the request for a worker until it joins.
        interval: seconds between two looks at the demand.
    """

    minimum: int
    maximum: int
    start_seconds: float
    interval: float = 1.0


class Scaler:
    """Requests workers, and removes those that are not needed."""

    def __init__(self, scaling: Scaling, fleet: Fleet) -> None:
        self.scaling = scaling
        self._fleet = fleet
        self._demands: list[Callable[[float, float], int]] = []
        self._looking = False

    def follow(self, demand: Callable[[float, float], int]) -> None:
        self._demands.append(demand)

    def look(self) -> None:
        """Compare the workers with the demand, now and periodically as long as anything runs."""
        if self._looking or not self._demands:
            return
        self._compare(sum(demand(self._fleet.now, self.scaling.start_seconds) for demand in self._demands))
        self._looking = self._fleet.later(self.scaling.interval, self._again)

    def _again(self) -> None:
        self._looking = False
        self.look()

    def _compare(self, demand: int) -> None:
        wanted = min(self.scaling.maximum, max(self.scaling.minimum, demand))
        requested = self._fleet.requested
        surplus = len(requested) - wanted
        for _ in range(-surplus):
            self._fleet.join(self.scaling.start_seconds)
        if surplus > 0:
            starting = [worker for worker in requested if not self._fleet.is_present(worker)]
            for worker in [*reversed(starting), *self._fleet.idle_workers()][:surplus]:
                self._fleet.leave(worker)
