"""Who pays for what. Pure.

Every second of a worker is paid for by one trial: the one that asked first for the last of the steps that were trained;
where nothing was trained, the first that waits for the evaluation. Seconds are rounded (:func:`rounded`), so that they
add up exactly however they are grouped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import msgspec

from hpstage.plan.facts import ChainLost, NodeId, StateReached, TrialId

# 2**-20 s is about a microsecond.
_PARTS = 2.0**20


def rounded(seconds: float) -> float:
    """``seconds`` to the nearest multiple of 2**-20. Sums and differences of such are exact, in any order, as long as
    they stay below 2**33 s."""
    return round(seconds * _PARTS) / _PARTS


def rounded_sum(seconds: Iterable[float]) -> float:
    """The sum of :func:`rounded` seconds."""
    return sum([round(part * _PARTS) for part in seconds if part]) / _PARTS


class Charge(msgspec.Struct, frozen=True):
    """What a worker reported, the trial that paid for it, and what that is in rounded seconds."""

    fact: StateReached
    trial: TrialId
    seconds: float


def charged(fact: StateReached, trial: TrialId) -> Charge:
    parts = round(fact.train_seconds * _PARTS) + round(fact.evaluate_seconds * _PARTS)
    if fact.load_seconds or fact.save_seconds:  # often neither took any time
        parts += round(fact.load_seconds * _PARTS) + round(fact.save_seconds * _PARTS)
    return Charge(fact, trial, parts / _PARTS)


class Waste(msgspec.Struct, frozen=True):
    """What a worker threw away, and the trial that paid for it."""

    fact: ChainLost
    trial: TrialId

    @property
    def seconds(self) -> float:
        return rounded(self.fact.seconds)


class Payments:
    """Who asked first for each step, and what each trial has paid."""

    def __init__(self) -> None:
        self.used: dict[TrialId, float] = {}  # rounded seconds of workers
        self._makers: list[TrialId] = []  # of each node, the trial that made it
        # Of each node, up to which steps it was asked for first, and by whom.
        self._asked: dict[NodeId, tuple[list[int], list[TrialId]]] = {}

    def made(self, trial: TrialId, nodes: int) -> None:
        """With the trial, there are so many nodes."""
        self._makers += [trial] * (nodes - len(self._makers))

    def ask(self, trial: TrialId, node: NodeId, stop: int) -> None:
        """The trial is the first that asks for the node up to ``stop``."""
        asked = self._asked.get(node)
        if asked is None:
            self._asked[node] = [stop], [trial]
        else:
            asked[0].append(stop)
            asked[1].append(trial)

    def charge(self, fact: StateReached, waiting: TrialId | None) -> Charge:
        """Let somebody pay for what was reached.

        Args:
            waiting: the first that waits for the state's evaluation.
        """
        payer = waiting if waiting is not None and fact.start == fact.step else self._payer(fact.node, fact.step)
        charge = charged(fact, payer)
        self.used[payer] = self.used.get(payer, 0.0) + charge.seconds
        return charge

    def waste(self, fact: ChainLost) -> Waste:
        """Let somebody pay for what was thrown away."""
        waste = Waste(fact, self._payer(fact.node, fact.step + 1))
        self.used[waste.trial] = self.used.get(waste.trial, 0.0) + waste.seconds
        return waste

    def _payer(self, node: NodeId, step: int) -> TrialId:
        """Who asked first for the step that leads to ``step``; if nobody did, who made the node."""
        stops, trials = self._asked.get(node, ([], []))
        at = bisect_left(stops, step)
        return trials[at] if at < len(stops) else self._makers[node]

    def askers(self, node: NodeId, start: int, stop: int) -> Sequence[tuple[int, int, TrialId]]:
        """Who asked first for which of the steps ``[start, stop)`` of a node; those that nobody asked for are left out.
        In the order of the steps."""
        asked = self._asked.get(node)
        if asked is None or start >= stop:
            return ()
        stops, trials = asked
        if stop <= stops[0]:
            return ((start, stop, trials[0]),)
        found = []
        for index in range(bisect_right(stops, start), len(stops)):
            end = min(stop, stops[index])
            found.append((start, end, trials[index]))
            start = end
            if start >= stop:
                break
        return found
