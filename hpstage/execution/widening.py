"""As how many a worker trains the chains that it trains side by side, which it learns in training them. Pure."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from hpstage.plan.step_times import ALONE, StepTimes

_RATIOS, _MOST_RATIOS, _COMPARING = 3, 9, 1.0
"""Comparisons of the steps of two numbers, of which the median counts: what else the machine does makes steps slower,
for a while or for long. There are so many at least, and at most, and no further ones after so many seconds."""
_STEPS, _SECONDS = 4, 0.1
"""The most steps of either number in a comparison, and seconds after which there are no further ones. The first step,
in which programs are built and models join, is not counted. Half as many are compared each time that chains end
before they were."""
_SETTLED = 50
"""Steps after which fewer chains than twice as many are taken to be as many as there will be."""


class Widening:
    """Decides as how many chains each step is trained, and learns up to how many that pays.

    No result depends on it. Where more chains run than are known to pay as one, some steps are trained as so many, and
    some with all as one. Both are steps of the same chains, so that nothing but the number differs. Then twice as many
    are compared with these, until that does not pay.

    Args:
        slots: the most chains that there can be.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.times: StepTimes = ALONE
        """Seconds of a step, in proportion to each other."""
        self._chains: Sequence[object] = ()
        self._steps = 0  # of as many chains
        self._rests = 0  # steps until something is compared again, after these could not be trained as one
        self._compared: list[int] = []  # what is compared, of which the first is trained next
        self._most = _STEPS  # of the steps that are counted
        self._taken: list[float] = []  # seconds of its steps
        self._means: list[float] = []  # of those before it
        self._ratios: dict[int, list[float]] = {}  # by the larger number
        self._spent: dict[int, float] = {}  # seconds of the steps of these

    def learn(self, seconds: tuple[tuple[int, float], ...]) -> None:
        """Take over what the plan knows, from others; where two have found otherwise, that counts for both."""
        if seconds and seconds[-1][0] >= self.times.widest and seconds != self.times.seconds:
            self.times = StepTimes(seconds)
            self._chains, self._compared = (), []

    @property
    def measures(self) -> bool:
        """Whether the seconds of the next step are needed."""
        return bool(self._compared)

    def width(self, chains: Sequence[object], worthwhile: int = sys.maxsize) -> int:
        """Return as how many these chains are to be trained in their next step, at most.

        Args:
            worthwhile: the most that it is worth to compare.
        """
        count, best = len(chains), self.times.best
        self._steps = self._steps + 1 if count == len(self._chains) else 0
        if chains != self._chains:
            if self._compared:  # they were too short to compare as many steps
                self._most = max(1, self._most // 2)
            self._chains, self._rests, self._compared = chains, 0, []
        self._rests = max(0, self._rests - 1)
        twice = min(2 * best, self._slots)
        settled = count == twice or self._steps >= _SETTLED
        known = count <= best or count > min(twice, worthwhile) or best < self.times.widest
        if settled and not (known or self._compared or self._rests):
            self._compared, self._taken, self._means = [best, count], [], []
        return self._compared[0] if self._compared else best

    def took(self, seconds: float, widths: Sequence[int]) -> bool:
        """Take in what a step took, and as how many each chain was trained; return whether more is known now."""
        width, count = self._compared[0], len(self._chains)
        if width == count and widths.count(width) != count:
            self._compared, self._rests = [], _SETTLED  # their steps differ, or no memory holds so many
            return False
        self._taken.append(seconds)
        self._spent[count] = self._spent.get(count, 0.0) + seconds
        counted = self._taken[1:]
        if not counted or (len(counted) < self._most and sum(counted) < _SECONDS):
            return False
        self._means.append(max(statistics.fmean(counted), 1e-9))
        self._compared, self._taken = self._compared[1:], []
        if self._compared:
            return False
        separately, as_one = self._means
        ratios = self._ratios.setdefault(count, [])
        ratios.append(as_one / separately)
        if len(ratios) < (_RATIOS if self._spent[count] >= _COMPARING else _MOST_RATIOS):
            return False
        best = self.times.best
        each = self.times.of(best) + self.times.of(count - best)
        self.times = StepTimes((*self.times.seconds, (count, each * statistics.median(ratios))))
        return True
