"""List scheduling on a virtual clock: whenever a worker is free, it takes the longest ready item. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import count
from typing import Generic, TypeVar

Ready = TypeVar("Ready")
Event = TypeVar("Event")


class ListSchedule(Generic[Ready, Event]):
    """Simulates list scheduling: which stages are ready, when each ends, and how many workers are ``free`` at the time
    ``now``, in seconds.

    The caller decides what a worker does, and for how long. Of equally long items, and of events at the same time, the
    one that was added first comes first.
    """

    def __init__(self, free: int) -> None:
        self.now, self.free = 0.0, free
        self._order = count()
        self._ready: list[tuple[float, int, Ready]] = []
        self._events: list[tuple[float, int, Event]] = []

    @property
    def waiting(self) -> int:
        """The number of ready items without a worker."""
        return len(self._ready)

    def wait(self, length: float, ready: Ready) -> None:
        heapq.heappush(self._ready, (-length, next(self._order), ready))

    def at(self, time: float, event: Event) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def take(self) -> Iterator[Ready]:
        """Yield the ready items, longest first, as long as the caller leaves a worker free."""
        while self._ready and self.free > 0:
            yield heapq.heappop(self._ready)[2]

    def advance(self, until: float = math.inf) -> Event | None:
        """Advance to the next event and return it; ``None`` if there is none until then."""
        if not self._events or self._events[0][0] > until:
            return None
        self.now, _, event = heapq.heappop(self._events)
        return event
