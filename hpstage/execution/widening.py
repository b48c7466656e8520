"""Decides how many of the chains on a worker are stacked in a step, and learns during training what pays. Pure."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from hpstage.plan.step_times import ALONE, StepTimes

_RATIOS, _MOST_RATIOS, _COMPARING = 3, 9, 1.0
"""Number of comparisons of two widths: the minimum, the maximum, and the seconds of comparing after which the minimum
is enough. Their median counts, since other processes may slow steps down for some time."""
_STEPS, _SECONDS = 4, 0.1
"""Maximum number of steps at each width in a comparison, and the seconds after which no more follow. The first step is
not counted, since programs are built and models join in it. The number is halved each time that chains end before their
comparison."""
_SETTLED = 50
"""Number of steps with an unchanged number of chains after which no more chains are expected to join."""


class Widening:
    """Decides how many chains are stacked in each step, and learns up to which number stacking pays.

    No result depends on this number. If more chains run than the number known to pay, some steps are trained with that
    number stacked, and some with all. Both are steps of the same chains, so that only the number differs. Then twice as
    many are compared with these, until stacking more does not pay.

    Args:
        slots: the maximum number of chains.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.times: StepTimes = ALONE
        """Relative seconds of a step, by number of stacked chains."""
        self._chains: Sequence[object] = ()
        self._steps = 0  # steps with the current number of chains
        self._rests = 0  # steps until the next comparison, after these chains could not all be stacked
        self._compared: list[int] = []  # widths still to compare; the next step is trained at the first
        self._most = _STEPS  # maximum number of counted steps
        self._taken: list[float] = []  # seconds of the steps at the current width
        self._means: list[float] = []  # mean seconds at the widths before
        self._ratios: dict[int, list[float]] = {}  # by the larger width
        self._spent: dict[int, float] = {}  # seconds of comparing, by the larger width

    def learn(self, seconds: tuple[tuple[int, float], ...]) -> None:
        """Adopt the plan's measurements, which come from other workers; they replace this worker's own."""
        if seconds and seconds[-1][0] >= self.times.widest and seconds != self.times.seconds:
            self.times = StepTimes(seconds)
            self._chains, self._compared = (), []

    @property
    def measures(self) -> bool:
        """Whether the seconds of the next step are needed."""
        return bool(self._compared)

    def width(self, chains: Sequence[object], worthwhile: int = sys.maxsize) -> int:
        """Return the maximum number of these chains to stack in their next step.

        Args:
            worthwhile: the largest number that is worth comparing.
        """
        count, best = len(chains), self.times.best
        self._steps = self._steps + 1 if count == len(self._chains) else 0
        if chains != self._chains:
            if self._compared:  # the chains ended before enough steps were compared
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
        """Record the seconds of a step, and for each chain the number of chains with which it was stacked. Return
        whether a new duration is known."""
        width, count = self._compared[0], len(self._chains)
        if width == count and widths.count(width) != count:
            self._compared, self._rests = [], _SETTLED  # not all can be stacked: steps differ, or memory is short
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
