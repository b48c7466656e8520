"""Pauses: times between the calls of ``optimize`` when no search was driven. They are not idle time. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import TypeVar

_T = TypeVar("_T", int, float)
Period = tuple[float, float]
"""``(start, stop)`` on the workers' clock."""


def united(periods: Iterable[tuple[_T, _T]]) -> list[tuple[_T, _T]]:
    """Return the union of the periods as disjoint periods, in order."""
    found: list[tuple[_T, _T]] = []
    for start, stop in sorted(periods):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


class Pauses:
    """The gaps between periods of work, on the workers' clock.

    Args:
        periods: periods of work, which may overlap.
    """

    def __init__(self, periods: Iterable[Period]) -> None:
        self.gaps: list[Period] = [(last, start) for (_, last), (start, _) in pairwise(united(periods))]
        self._starts = [start for start, _ in self.gaps]
        self._seconds = [0.0, *accumulate(stop - start for start, stop in self.gaps)]  # total of the gaps before each

    @property
    def seconds(self) -> float:
        """Total length of all pauses."""
        return self._seconds[-1]

    def before(self, at: float) -> float:
        """Return the seconds of pauses before a time. O(log pauses)."""
        index = bisect_left(self._starts, at) - 1
        if index < 0:
            return 0.0
        start, stop = self.gaps[index]
        return self._seconds[index] + min(at, stop) - start

    def all_elapsed(self, start: float, stops: Iterable[float]) -> list[float]:
        """Return :meth:`elapsed` from ``start`` to each of the times."""
        if not self.gaps:
            return [stop - start for stop in stops]
        return [self.elapsed(start, stop) for stop in stops]

    def elapsed(self, start: float, stop: float) -> float:
        """Return the seconds from one time to another, not counting the pauses between them."""
        return stop - start - (self.before(stop) - self.before(start)) if self.gaps else stop - start
