"""Widths of gangs: how many workers train a chain, and how much that is known to gain. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from hpstage.plan.facts import StateReached

# What twice as many workers are taken to gain before it is measured.
_DOUBLING = 1.8
# Twice as many workers must gain at least this factor.
_LEAST_GAIN = 1.1


class Widths:
    """The speed-up of a chain by several workers instead of one, as measured by their own reports.

    Attributes:
        widest: the most workers that may train a chain together; 1: gangs are not formed.
    """

    def __init__(self, widest: int = 1) -> None:
        self.widest = widest  # the most workers that may train a chain together; 1: gangs are not formed
        self._seconds: dict[int, tuple[float, float]] = {}  # by width: of one worker alone, and those that passed

    def learn(self, reached: StateReached) -> None:
        """Learn from a report of a gang's training, except one of only the chain's first step, which is slower than
        others."""
        width = int(reached.workers)
        warms_up = reached.source is not None and reached.step - reached.start == 1
        if width < 2 or reached.train_seconds <= 0.0 or warms_up:
            return
        alone, passed = self._seconds.get(width, (0.0, 0.0))
        self._seconds[width] = alone + reached.own_seconds, passed + reached.train_seconds / width

    def speedup(self, width: int) -> float:
        """Estimate how many times as fast as one worker a gang of this width trains."""
        if width == 1:
            return 1.0
        if width in self._seconds:
            alone, passed = self._seconds[width]
            return alone / passed
        narrower = max((known for known in self._seconds if known < width), default=1)
        wider = min((known for known in self._seconds if known > width), default=None)
        if wider is not None:
            return float(self.speedup(wider) ** (math.log(width) / math.log(wider)))
        return float(self.speedup(narrower) * _DOUBLING ** math.log2(width / narrower))

    def gains(self, width: int) -> bool:
        """Whether twice as many workers are expected to pay off, where a chain may have that many."""
        return 2 * width <= self.widest and self.speedup(2 * width) >= _LEAST_GAIN * self.speedup(width)

    def loses(self, width: int) -> bool:
        """Whether half as many workers are no slower."""
        return width > 1 and self.speedup(width) <= self.speedup(width // 2)

    def share(self, paths: Sequence[float], widths: Sequence[int], spare: int, worth: float) -> list[int]:
        """Return the widths of chains when ``spare`` more workers have nothing to do.

        The chain that would end last gets twice as many workers, again and again.

        Args:
            paths: the seconds of each chain's remaining path on one worker.
            widths: how many workers each has.
            worth: the least seconds that doubling must save.
        """
        shared = list(widths)
        ahead = [
            (-path / self.speedup(width), place) for place, (path, width) in enumerate(zip(paths, widths, strict=True))
        ]
        heapq.heapify(ahead)
        while spare and ahead:
            left, place = heapq.heappop(ahead)
            width = shared[place]
            if width > spare or not self.gains(width):
                continue
            shorter = -paths[place] / self.speedup(2 * width)
            if shorter - left < worth:
                continue
            shared[place] *= 2
            spare -= width
            heapq.heappush(ahead, (shorter, place))
        return shared
