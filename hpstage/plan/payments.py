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
    """The trials that asked first for each step, and the seconds that each trial has paid."""

    def __init__(self) -> None:
        self.used: dict[TrialId, float] = {}  # rounded seconds of workers
        self._makers: list[TrialId] = []  # the trial that created each node
        # For each node, the ascending stops up to which it was asked for first, and the trials that asked.
        self._asked: dict[NodeId, list[tuple[int, TrialId]]] = {}

    def made(self, trial: TrialId, nodes: int) -> None:
        """Record that the plan has ``nodes`` nodes now that ``trial`` is added."""
        self._makers += [trial] * (nodes - len(self._makers))

    def ask(self, trial: TrialId, node: NodeId, stop: int) -> None:
        """Record that the trial is the first to ask for the node up to ``stop``."""
        self._asked.setdefault(node, []).append((stop, trial))

    def charge(self, fact: StateReached, waiting: TrialId | None) -> Charge:
        """Charge a reached state to a trial.

        Args:
            waiting: the first trial that waits for the state's evaluation.
        """
        payer = waiting if waiting is not None and fact.start == fact.step else self._payer(fact.node, fact.step)
        charge = charged(fact, payer)
        self.used[payer] = self.used.get(payer, 0.0) + charge.seconds
        return charge

    def waste(self, fact: ChainLost) -> Waste:
        """Charge discarded training to a trial."""
        waste = Waste(fact, self._payer(fact.node, fact.step + 1))
        self.used[waste.trial] = self.used.get(waste.trial, 0.0) + waste.seconds
        return waste

    def _payer(self, node: NodeId, step: int) -> TrialId:
        """Return the trial that asked first for the step that leads to ``step``, or else the node's creator."""
        asked = self._asked.get(node, ())
        at = bisect_left(asked, step, key=_stop)
        return asked[at][1] if at < len(asked) else self._makers[node]

    def askers(self, node: NodeId, start: int, stop: int) -> Sequence[tuple[int, int, TrialId]]:
        """Return ``(start, stop, trial)`` for the steps ``[start, stop)`` of a node: who asked for them first, in the
        order of the steps. Steps that no trial asked for are left out."""
        asked = self._asked.get(node)
        if asked is None or start >= stop:
            return ()
        if stop <= asked[0][0]:
            return ((start, stop, asked[0][1]),)
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
