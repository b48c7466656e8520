"""How long a search will go on: an estimate. Pure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from hpstage.outlook import Outlook


@dataclass(slots=True)
class Growth:
    """How many distinct steps trials have added, as they were proposed.

    Later trials add less than the first: they find more that is shared. So what the next ones will add is judged by
    the later half of those that are there.
    """

    _proposed: list[int] = field(default_factory=list)
    _steps: list[int] = field(default_factory=list)

    def note(self, proposed: int, steps: int) -> None:
        """So many trials were proposed, with so many distinct steps asked of them all. Both never fall."""
        if self._proposed and self._proposed[-1] == proposed:
            self._steps[-1] = steps
        else:
            self._proposed.append(proposed)
            self._steps.append(steps)

    def steps_per_trial(self) -> float:
        """Distinct steps that a trial of the later half has added; 0 before there is one. O(log)."""
        if not self._proposed or not self._proposed[-1]:
            return 0.0
        half = bisect_right(self._proposed, self._proposed[-1] // 2) - 1
        proposed, steps = (self._proposed[half], self._steps[half]) if half >= 0 else (0, 0)
        return (self._steps[-1] - steps) / (self._proposed[-1] - proposed)


def seconds_left(outlook: Outlook, *, workers: int, unproposed_seconds: float, parallelism: float) -> float | None:
    """About how long it takes from now on; ``None`` without workers.

    What is known is bounded by its longest way, and by its work shared among all workers. Trials that are not proposed
    yet come on top, at the rate at which work was done so far: they may come too late to keep all workers busy.
    What an algorithm may still ask of trials that are there is not known and not counted.

    Args:
        outlook: what is asked for.
        workers: how many there are now.
        unproposed_seconds: of one worker, for trials that are not proposed yet.
        parallelism: how many workers have been busy so far, on average.
    """
    if not workers:
        return None
    busy = min(max(parallelism, 1.0), workers)
    return max(outlook.path_seconds, outlook.work_seconds / workers + unproposed_seconds / busy)
