"""Charging of workers' time to trials. Pure.

Every second of a worker is paid for by one trial: the first that requested the last of the steps trained or, where
nothing was trained, the first that waits for the evaluation. Seconds are rounded (:func:`rounded`), so that they
add up exactly however they are grouped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter

import msgspec

from hpstage.plan.facts import ChainLost, StateReached, TrialId
from hpstage.plan.nodes import Node, PlannedTrial

# 2**-20 s is about a microsecond.
_PARTS = 2.0**20


def rounded(seconds: float) -> float:
    """Round ``seconds`` to the nearest multiple of 2**-20. Sums and differences of such values are exact, in any order,
    as long as they stay below 2**33 s."""
    return round(seconds * _PARTS) / _PARTS


def rounded_sum(seconds: Iterable[float]) -> float:
    """Return the sum of the :func:`rounded` seconds."""
    return sum([round(part * _PARTS) for part in seconds if part]) / _PARTS


class Charge(msgspec.Struct, frozen=True):
    """A state that a worker reached, the trial that paid for it, and the cost in rounded seconds."""

    fact: StateReached
    trial: TrialId
    seconds: float


class Waste(msgspec.Struct, frozen=True):
    """Training that a worker discarded, the trial that paid for it, and its rounded seconds."""

    fact: ChainLost
    trial: TrialId
    seconds: float


class NodeRow:
    """Of a node: how far and by whom it was requested, how far and how long it was trained."""

    __slots__ = ("answered", "askers", "front", "node", "reach", "seconds", "trained")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.reach = node.start  # the farthest step that any trial requested
        # The ascending stops up to which it was requested first, and the trials that did. A node that was requested by
        # its maker alone, as most are, has none.
        self.askers: list[tuple[int, PlannedTrial]] | None = None
        self.answered = 0  # steps up to their last results of the trials of the maker's study, summed
        self.front = 0  # the farthest step that it has ever reached; 0: none
        self.trained = 0  # steps trained, including repetitions
        self.seconds = 0.0  # training time of these steps

    def ask(self, trial: PlannedTrial, stop: int) -> None:
        """Record that the trial is the first to request the node beyond its reach so far, up to ``stop``."""
        if self.askers is None:
            if trial is not self.node.maker:
                known = [(self.reach, self.node.maker)] if self.reach > self.node.start else []
                self.askers = [*known, (stop, trial)]
        else:
            if self.askers and self.askers[-1][1] is trial:
                self.askers.pop()
            self.askers.append((stop, trial))
        self.reach = stop

    def payer(self, step: int) -> PlannedTrial:
        """Return the trial that requested first the step that leads to ``step``, or else the node's maker."""
        if self.askers is None:
            return self.node.maker
        at = bisect_left(self.askers, step, key=_stop)
        return self.askers[at][1] if at < len(self.askers) else self.node.maker

    def first_askers(self, start: int, stop: int) -> Sequence[tuple[int, int, PlannedTrial]]:
        """Return ``(start, stop, trial)`` for the steps ``[start, stop)``: who requested them first, in the order of
        the steps. Steps that no trial requested are left out."""
        stop = min(stop, self.reach)
        if start >= stop:
            return ()
        if self.askers is None:
            return ((start, stop, self.node.maker),)
        found = []
        for index in range(bisect_right(self.askers, start, key=_stop), len(self.askers)):
            last, trial = self.askers[index]
            end = min(stop, last)
            found.append((start, end, trial))
            start = end
            if start >= stop:
                break
        return found


_stop = itemgetter(0)
