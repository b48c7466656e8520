"""How long a search will go on: an estimate. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpstage.scheduler.remaining import Outlook


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a search has asked for by now, in steps: of each trial alone (``steps``), and distinct ones among them."""

    trials: int
    expected: int
    """Trials that there will be in all, at least ``trials``."""
    over: int
    """Of ``trials``."""
    steps: int
    steps_over: int
    """Of the trials that are over."""
    distinct: int
    exponent: float = 1.0
    """Of :func:`growth`."""


def still_to_ask(asked: Asked) -> float:
    """Distinct steps that a search has still to ask for, as far as what it did says.

    Open trials are taken to come as far as those that are over have on average, and to share as much; further trials to
    go on as the trials so far.
    """
    if not asked.trials or not asked.steps:
        return 0.0
    further = 0.0
    if asked.over:
        far = asked.steps_over / asked.over * (asked.trials - asked.over)
        further = max(0.0, far - (asked.steps - asked.steps_over)) * asked.distinct / asked.steps
    grown: float = (asked.expected / asked.trials) ** asked.exponent
    return further + (asked.distinct + further) * (grown - 1.0)


def growth(first: Sequence[int], second: Sequence[int]) -> float:
    """How distinct steps grow with the number of trials: as this power of it.

    Later trials find more that is shared, as a text's later pages find fewer new words (Heaps' law).

    Args:
        first, second: distinct steps that each of some trials has added, of the first and the second half of all.
    """
    if not first or not second or not any(first):
        return 1.0
    early, late = sum(first) / len(first), sum(second) / len(second)
    return min(1.0, math.log2(1.0 + late / early))


class Busy:
    """How many workers are busy at a time: the average so far, in which the past counts the less the longer it is ago.

    A moment's weight is its distance from the beginning: searches begin with few long ways that all trials share.
    """

    def __init__(self) -> None:
        self.average = 0.0
        self._until = 0.0

    def note(self, elapsed: float, running: int) -> None:
        """So many chains run ``elapsed`` seconds after the beginning, and have since the last note."""
        if elapsed > self._until:
            new = 1.0 - (self._until / elapsed) ** 2
            self.average += new * (running - self.average)
            self._until = elapsed


def seconds_left(outlook: Outlook, *, workers: int, later_seconds: float, busy: float) -> float | None:
    """About how long it takes from now on; ``None`` without workers.

    What is asked for is bounded by its longest way, and by its work shared among all workers. What is still to be asked
    comes on top, spread over as many workers as were busy so far: it may come too late to keep all of them busy.

    Args:
        outlook: what is asked for.
        workers: how many there are now.
        later_seconds: of one worker, for what is still to be asked.
        busy: how many workers have been busy so far.
    """
    if not workers:
        return None
    later = later_seconds / min(max(busy, 1.0), workers)
    return max(outlook.path_seconds, outlook.work_seconds / workers + later)
