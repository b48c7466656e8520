"""Synchronous successive halving (Jamieson and Talwalkar, AISTATS 2016, arXiv 1502.07943)."""

from __future__ import annotations

from dataclasses import dataclass

from hpstage.algorithm import Action, Algorithm, Ask, Finish, Search, Setting, Trials
from hpstage.algos.rungs import check_rungs, rung_steps
from hpstage.errors import UsageError


@dataclass(frozen=True)
class SuccessiveHalving(Algorithm):
    """Trains all trials to ``min_steps``, the best ``1 / reduction_factor`` of them ``reduction_factor`` times as far,
    and so on, until the best are trained to the last step.

    Rungs lie at ``min_steps * reduction_factor**k`` below the last step, and at the last step. Synchronous: a rung
    is decided when all its trials have been told, so that one seed gives the same search on any cluster. Equal
    values are ranked in the order of the trials. Trials that fail leave their rung; what is promoted is counted
    from the trials that were proposed, and at least one is.

    Args:
        min_steps: steps before the first decision.
        reduction_factor: the share that goes on, as its inverse; at least 2.
    """

    min_steps: int = 1
    reduction_factor: int = 4

    def check(self, setting: Setting) -> None:
        check_rungs(self.min_steps, self.reduction_factor, setting.steps)
        if setting.n_trials is None:
            raise UsageError("SuccessiveHalving compares a fixed number of trials; give n_trials")

    def rungs(self, steps: int) -> list[int]:
        """The steps at which trials are compared; the last is the end."""
        return rung_steps(self.min_steps, self.reduction_factor, steps)

    def start(self, setting: Setting, trials: Trials) -> Search:
        assert setting.n_trials is not None
        return HalvingSearch(self.rungs(setting.steps), self.reduction_factor, setting.n_trials, setting.maximize)


class HalvingSearch(Search):
    """One halving of ``n_trials``, whatever their indices."""

    def __init__(self, rungs: list[int], factor: int, n_trials: int, maximize: bool) -> None:
        self._rungs = rungs
        self._factor = factor
        self._n_trials = n_trials
        self._sign = -1.0 if maximize else 1.0
        self._rung = 0
        self._waiting: set[int] = set()
        self._values: dict[int, float] = {}
        self._added = 0
        self._closed = False

    def room(self) -> int:
        return 0 if self._closed else self._n_trials - self._added

    def added(self, index: int) -> list[Action]:
        self._added += 1
        self._waiting.add(index)
        return [Ask(index, self._rungs[0])]

    def told(self, index: int, step: int, value: float) -> list[Action]:
        self._waiting.remove(index)
        self._values[index] = value
        return self._decide()

    def failed(self, index: int) -> list[Action]:
        self._waiting.discard(index)
        return self._decide()

    def closed(self) -> list[Action]:
        self._closed = True
        return self._decide()

    def _decide(self) -> list[Action]:
        if self._waiting or self.room() > 0 or not self._values:
            return []
        ranked = sorted(self._values, key=lambda index: (self._sign * self._values[index], index))
        self._values = {}
        if self._rung == len(self._rungs) - 1:
            return [Finish(index, "complete") for index in sorted(ranked)]
        self._rung += 1
        promoted = max(1, self._added // self._factor**self._rung)
        self._waiting = set(ranked[:promoted])
        pruned: list[Action] = [Finish(index, "pruned") for index in sorted(ranked[promoted:])]
        return pruned + [Ask(index, self._rungs[self._rung]) for index in sorted(self._waiting)]
