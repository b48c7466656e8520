"""Estimate of the remaining time of a search. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpstage.scheduler.remaining import RemainingWork


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The steps that a search has asked for so far: of all its trials (``steps``), and the distinct ones among them."""

    trials: int
    expected: int
    """Total number of trials expected, at least ``trials``."""
    over: int
    """How many of ``trials`` have ended."""
    steps: int
    steps_over: int
    """Steps of the trials that have ended."""
    distinct: int
    exponent: float = 1.0
    """The exponent from :func:`growth`."""


def still_to_ask(asked: Asked) -> float:
    """Estimate the number of distinct steps that a search will still ask for, from its history.

    Open trials are assumed to get as far as those that have ended did on average, and to share as much; further trials
    are assumed to behave like the trials so far.
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
    """Return the exponent of the growth of distinct steps with the number of trials.

    Later trials find more training to share, as later pages of a text contain fewer new words (Heaps' law).

    Args:
        first, second: distinct steps added by each of some trials, from the first and the second half of all trials.
    """
    if not first or not second or not any(first):
        return 1.0
    early, late = sum(first) / len(first), sum(second) / len(second)
    return min(1.0, math.log2(1.0 + late / early))


class Busy:
    """Running average of the number of busy workers, in which older values count less.

    A moment's weight is its distance from the start, since searches start with a few long paths that all trials share.
    """

    def __init__(self) -> None:
        self.average = 0.0
        self._until = 0.0

    def note(self, elapsed: float, running: int) -> None:
        """Record that ``running`` chains are active ``elapsed`` seconds after the start, and since the last call."""
        if elapsed > self._until:
            new = 1.0 - (self._until / elapsed) ** 2
            self.average += new * (running - self.average)
            self._until = elapsed


def seconds_left(remaining: RemainingWork, *, workers: float, later_seconds: float, busy: float) -> float | None:
    """Estimate the remaining seconds; ``None`` without workers.

    The work asked for is bounded by its longest path, and by its total divided among all workers. The work still to be
    asked is added, divided by the number of workers busy so far: it may be asked too late to keep all of them busy.

    Args:
        remaining: the work asked for.
        workers: how many workers that train a chain at a time train as much as the present ones.
        later_seconds: worker seconds of the work still to be asked.
        busy: average number of busy workers so far.
    """
    if not workers:
        return None
    later = later_seconds / min(max(busy, 1.0), workers)
    return max(remaining.path_seconds, remaining.work_seconds / workers + later)
