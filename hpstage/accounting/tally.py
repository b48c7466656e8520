"""Counts of what was requested and trained: :class:`Tally` by study, :class:`NodeRow` by node. Pure.

Several studies may share a node.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal

from hpstage.accounting.sums import Sums
from hpstage.plan.facts import DriverId, NodeId, StateReached, TrialId
from hpstage.plan.nodes import Node, PlannedTrial

End = Literal["COMPLETE", "PRUNED", "FAIL", "REJECTED"]
"""How a trial has ended. REJECTED: the space raised instead of returning its schedules, so nothing was trained; in the
study, it is pruned or has failed."""


@dataclass(slots=True)
class Tally:
    """A study's sums, now and when its last search began."""

    sums: Sums = field(default_factory=Sums)
    before: Sums = field(default_factory=Sums)
    """The sums when the last search began."""
    allocated_before: float = 0.0
    """Allocated worker seconds when the last search began."""
    drivers_before: frozenset[DriverId] = frozenset()
    """The study's drivers when the last search began."""
    reach: dict[NodeId, int] = field(default_factory=dict)  # the farthest step requested of each node
    ends: dict[TrialId, End | None] = field(default_factory=dict)
    """How each of its trials has ended, ``None`` if it has not."""
    by_end: Counter[End | None] = field(default_factory=Counter)
    """Number of trials by end."""
    _answered: dict[NodeId, int] = field(default_factory=dict)  # steps up to each trial's last result, summed

    def end(self, trial: TrialId, end: End | None) -> None:
        """Record how a trial has ended; ``None``: it has begun."""
        if trial in self.ends:
            self.by_end[self.ends[trial]] -= 1
        self.ends[trial] = end
        self.by_end[end] += 1

    def retract(self, node: NodeId, last: int) -> None:
        """Subtract the steps of a node beyond ``last``, where its training has ended."""
        beyond = self.reach.get(node, last) - last
        if beyond > 0:
            self.sums.steps_unique -= beyond
            self.reach[node] = last

    def answer(self, row: NodeRow, steps: int, pace: float) -> None:
        """Count further steps up to a trial's last result, at a node's seconds per step."""
        self._answered[row.node.id] = self._answered.get(row.node.id, 0) + steps
        self.sums.alone_train_seconds += steps * pace

    def repace(self, row: NodeRow, fact: StateReached) -> None:
        """Update estimates before folding ``fact``, which changes the seconds per step of a node trained before."""
        steps = self._answered.get(row.node.id)
        if steps:
            after = (row.seconds + fact.own_seconds) / (row.trained + fact.step - fact.start)
            self.sums.alone_train_seconds += steps * (after - row.seconds / row.trained)


class NodeRow:
    """A node's requests, by trial, and the steps and seconds that it was trained."""

    __slots__ = ("done", "front", "node", "reach", "requesters", "seconds", "trained")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.reach = node.start  # the farthest step that any trial requested
        # (stop, trial), ascending: the trial was the first to request the node up to that stop. None for a node that
        # was only requested by its maker, as most are.
        self.requesters: list[tuple[int, PlannedTrial]] | None = None
        self.front = 0  # the farthest step that it has ever reached; 0: none
        self.done = node.start  # the step up to which its stages were counted as done
        self.trained = 0  # steps trained, including repetitions
        self.seconds = 0.0  # training time of these steps

    def ask(self, trial: PlannedTrial, stop: int) -> None:
        """Record that the trial is the first to request the node beyond its reach so far, up to ``stop``."""
        if self.requesters is None:
            if trial is not self.node.maker:
                known = [(self.reach, self.node.maker)] if self.reach > self.node.start else []
                self.requesters = [*known, (stop, trial)]
        else:
            if self.requesters and self.requesters[-1][1] is trial:
                self.requesters.pop()
            self.requesters.append((stop, trial))
        self.reach = stop

    def complete(self) -> bool:
        """Return whether all its requested steps are trained, for the first time since further steps were requested."""
        if self.done < self.reach <= self.front:
            self.done = self.reach
            return True
        return False

    def payer(self, step: int) -> PlannedTrial:
        """Return the trial that was the first to request the state at ``step``, or else the node's maker."""
        if self.requesters is None:
            return self.node.maker
        at = bisect_left(self.requesters, step, key=_stop)
        return self.requesters[at][1] if at < len(self.requesters) else self.node.maker

    def first_requests(self, start: int, stop: int) -> Sequence[tuple[int, int, PlannedTrial]]:
        """Return ``(start, stop, trial)`` for steps in ``[start, stop)``, in order: ``trial`` was the first to request
        them. Steps that no trial requested are left out."""
        stop = min(stop, self.reach)
        if start >= stop:
            return ()
        if self.requesters is None:
            return ((start, stop, self.node.maker),)
        found = []
        for index in range(bisect_right(self.requesters, start, key=_stop), len(self.requesters)):
            last, trial = self.requesters[index]
            end = min(stop, last)
            found.append((start, end, trial))
            start = end
            if start >= stop:
                break
        return found


_stop = itemgetter(0)
