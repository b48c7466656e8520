"""Charging of workers' time to trials. Pure.

Every second of a worker is paid for by one trial: the first that asked for the last of the steps trained or, where
nothing was trained, the first that waits for the evaluation. Seconds are rounded (:func:`rounded`), so that they
add up exactly however they are grouped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter

import msgspec

from hpstage.plan.facts import ChainLost, NodeId, StateReached, TrialId
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


def charged(fact: StateReached, trial: TrialId) -> Charge:
    parts = round(fact.train_seconds * _PARTS) + round(fact.evaluate_seconds * _PARTS)
    if fact.load_seconds or fact.save_seconds:  # often both are zero
        parts += round(fact.load_seconds * _PARTS) + round(fact.save_seconds * _PARTS)
    return Charge(fact, trial, parts / _PARTS)


class Waste(msgspec.Struct, frozen=True):
    """Training that a worker discarded, and the trial that paid for it."""

    fact: ChainLost
    trial: TrialId

    @property
    def seconds(self) -> float:
        return rounded(self.fact.seconds)


class Payments:
    """The trials that asked first for each step, which pay for it."""

    def __init__(self) -> None:
        # For each node, the ascending stops up to which it was asked for first, and the trials that asked. A node that
        # was asked for by its maker alone, as most are, has none.
        self._asked: dict[NodeId, list[tuple[int, PlannedTrial]]] = {}

    def ask(self, trial: PlannedTrial, node: Node, stop: int) -> None:
        """Record that the trial is the first to ask for the node beyond its reach so far, up to ``stop``."""
        asked = self._asked.get(node.id)
        if asked is None:
            if trial is node.maker:
                return
            asked = self._asked[node.id] = [(node.reach, node.maker)] if node.reach > node.start else []
        if asked and asked[-1][1] is trial:
            asked.pop()
        asked.append((stop, trial))

    def charge(self, fact: StateReached, node: Node, waiting: PlannedTrial | None) -> Charge:
        """Charge a reached state to a trial.

        Args:
            waiting: the first trial that waits for the state's evaluation, if nothing was trained.
        """
        payer = self._payer(node, fact.step) if waiting is None else waiting
        charge = charged(fact, payer.id)
        payer.paid_seconds += charge.seconds
        return charge

    def waste(self, fact: ChainLost, node: Node) -> Waste:
        """Charge discarded training to a trial."""
        payer = self._payer(node, fact.step + 1)
        waste = Waste(fact, payer.id)
        payer.paid_seconds += waste.seconds
        return waste

    def _payer(self, node: Node, step: int) -> PlannedTrial:
        """Return the trial that asked first for the step that leads to ``step``, or else the node's maker."""
        asked = self._asked.get(node.id, ())
        at = bisect_left(asked, step, key=_stop)
        return asked[at][1] if at < len(asked) else node.maker

    def askers(self, node: Node, start: int, stop: int) -> Sequence[tuple[int, int, PlannedTrial]]:
        """Return ``(start, stop, trial)`` for the steps ``[start, stop)`` of a node: who asked for them first, in the
        order of the steps. Steps that no trial asked for are left out."""
        stop = min(stop, node.reach)
        if start >= stop:
            return ()
        asked = self._asked.get(node.id)
        if asked is None:
            return ((start, stop, node.maker),)
        found = []
        for index in range(bisect_right(asked, start, key=_stop), len(asked)):
            last, trial = asked[index]
            end = min(stop, last)
            found.append((start, end, trial))
            start = end
            if start >= stop:
                break
        return found


_stop = itemgetter(0)
