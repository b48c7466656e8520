"""Widths of gangs: how many workers train a chain, and how much that is known to gain. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from hpstage.plan.facts import StateReached

# Speed-up by twice as many workers, assumed before it is measured.
_DOUBLING = 1.8
# Twice as many workers must gain at least this factor.
_LEAST_GAIN = 1.1


class Widths:
    """The speed-up of a chain by several workers instead of one, as measured by their own reports.

    Attributes:
        widest: maximum number of workers that may train a chain together; 1: gangs are not formed.
    """

    def __init__(self, widest: int = 1) -> None:
        self.widest = widest
        self._seconds: dict[int, tuple[float, float]] = {}  # by width: seconds of one worker, and of the gang

    def learn(self, reached: StateReached) -> None:
        """Learn from a report of a gang's training, unless it covers only the chain's first step, which is slower than
        others."""
        width = int(reached.workers)
        warms_up = reached.source is not None and reached.step - reached.start == 1
        if width < 2 or reached.train_seconds <= 0.0 or warms_up:
            return
        alone, passed = self._seconds.get(width, (0.0, 0.0))
        self._seconds[width] = alone + reached.own_seconds, passed + reached.train_seconds / width

    def speedup(self, width: int) -> float:
        """Estimate the speed of a gang of this width, relative to one worker."""
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
        """Whether a chain may have twice as many workers, and these are expected to pay off."""
        return 2 * width <= self.widest and self.speedup(2 * width) >= _LEAST_GAIN * self.speedup(width)

    def loses(self, width: int) -> bool:
        """Whether half as many workers are no slower."""
        return width > 1 and self.speedup(width) <= self.speedup(width // 2)

    def share(self, paths: Sequence[float], widths: Sequence[int], spare: int, worth: float) -> list[int]:
        """Return the widths of chains after distributing ``spare`` idle workers.

        Repeatedly, the chain that would end last gets twice as many workers.

        Args:
            paths: the seconds of each chain's remaining path on one worker.
            widths: how many workers each has.
            worth: minimum number of seconds that doubling must save.
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
