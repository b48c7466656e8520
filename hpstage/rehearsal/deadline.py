"""The smallest fleet that makes a deadline, fixed or elastic, and its cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpstage.rehearsal.rehearse import Rehearsal

# The largest fleet that is tried, and the least by which twice as many workers must be faster to try more.
_LARGEST, _FASTER = 4096, 0.001


@dataclass(frozen=True, slots=True)
class FleetCost:
    """A fleet of at most so many workers, with the worst figures of all rehearsals.

    The smallest fleet that makes a deadline is the cheapest, but for a few seconds: twice as many workers never need
    less than half the time.
    """

    workers: int
    makespan: float
    paid_seconds: float
    """Seconds of all workers: from the request for each until it leaves, or for the whole makespan."""


def cheapest(rehearse: Callable[[int], Sequence[Rehearsal]], deadline: float, workers: int) -> FleetCost | None:
    """Return the smallest fleet whose makespan is at most ``deadline`` seconds in every rehearsal, found by bisection.

    ``None``: none is, since some trial takes longer by itself.

    Args:
        rehearse: rehearses the search on so many workers, at most.
        workers: where to begin.
    """
    found: dict[int, FleetCost] = {}

    def on(workers: int) -> FleetCost:
        if workers not in found:
            runs = rehearse(workers)
            found[workers] = FleetCost(
                workers, max(run.makespan for run in runs), max(run.paid_seconds for run in runs)
            )
        return found[workers]

    enough, before = workers, math.inf
    while on(enough).makespan > deadline:
        if enough >= _LARGEST or on(enough).makespan > (1 - _FASTER) * before:
            return None
        before = on(enough).makespan
        enough *= 2
    too_few = max((count for count, cost in found.items() if cost.makespan > deadline), default=0)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if on(middle).makespan <= deadline:
            enough = middle
        else:
            too_few = middle
    return on(enough)
