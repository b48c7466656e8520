"""Pauses: times between the calls of ``optimize`` in which nobody drove a search. They are nobody's idle time. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable


class Pauses:
    """The gaps between periods of work, on the workers' clock.

    Args:
        periods: ``(start, stop)``; they may overlap.
    """

    def __init__(self, periods: Iterable[tuple[float, float]]) -> None:
        self.gaps: list[tuple[float, float]] = []
        self._starts: list[float] = []
        self._seconds = [0.0]  # of all gaps before each
        last: float | None = None
        for start, stop in sorted(periods):
            if last is not None and start > last:
                self.gaps.append((last, start))
                self._starts.append(last)
                self._seconds.append(self._seconds[-1] + start - last)
            last = stop if last is None else max(last, stop)

    @property
    def seconds(self) -> float:
        """Of all of them."""
        return self._seconds[-1]

    def before(self, at: float) -> float:
        """Seconds of pauses before a time. O(log pauses)."""
        index = bisect_left(self._starts, at) - 1
        if index < 0:
            return 0.0
        start, stop = self.gaps[index]
        return self._seconds[index] + min(at, stop) - start

    def all_elapsed(self, start: float, stops: Iterable[float]) -> list[float]:
        """:meth:`elapsed` to each of the times."""
        if not self.gaps:
            return [stop - start for stop in stops]
        return [self.elapsed(start, stop) for stop in stops]

    def elapsed(self, start: float, stop: float) -> float:
        """Seconds from one time to another without the pauses between them."""
        return stop - start - (self.before(stop) - self.before(start)) if self.gaps else stop - start
