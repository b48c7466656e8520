"""The results of a study's trials as they arrive: the best ones, and the counts of each step. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass

from hpstage.accounting.tally import Tally
from hpstage.plan.facts import TrialId
from hpstage.plan.winners import Rank, rank


@dataclass(slots=True)
class Rung:
    """A step at which trials are evaluated."""

    requested: int = 0
    evaluated: int = 0
    best: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    trial: TrialId
    step: int
    value: float


class Standings:
    """The trials of a study ranked by their last results.

    Before the end of a trial or of its constraints changes, call :meth:`withdraw`; afterwards, :meth:`enter`.
    """

    def __init__(self, tally: Tally) -> None:
        self.rungs: dict[int, Rung] = {}
        self.results: dict[TrialId, Result] = {}
        """The finite result of each trial at its last step."""
        self._ends = tally.ends
        self._infeasible: set[TrialId] = set()  # completed trials that do not satisfy the study's constraints
        self._ranking: list[tuple[bool, Rank, TrialId]] = []  # of the results, the best first
        self._maximize = False

    def restart(self, *, maximize: bool) -> None:
        """Rank the results again, since another call of the study may have the other direction."""
        self._maximize = maximize
        self._ranking = sorted(map(self._rank, self.results.values()))

    def withdraw(self, trial: TrialId) -> None:
        """Remove a trial from the ranking, before its end or its last result changes."""
        result = self.results.get(trial)
        if result is not None:
            del self._ranking[bisect_left(self._ranking, self._rank(result))]

    def enter(self, trial: TrialId, *, feasible: bool) -> None:
        """Put a trial into the ranking again."""
        (self._infeasible.discard if feasible else self._infeasible.add)(trial)
        if trial in self.results:
            insort(self._ranking, self._rank(self.results[trial]))

    def request(self, step: int) -> None:
        self.rungs.setdefault(step, Rung()).requested += 1

    def report(self, trial: TrialId, step: int, value: float) -> Result | None:
        """Count a trial as evaluated at a step, and return its result; ``None`` if the value is not finite."""
        rung = self.rungs.setdefault(step, Rung())
        rung.evaluated += 1
        if not math.isfinite(value):
            return None
        rung.best = value if rung.best is None else (max if self._maximize else min)(rung.best, value)
        result, last = Result(trial, step, value), self.results.get(trial)
        if last is None or step > last.step:
            self.withdraw(trial)
            self.results[trial] = result
            insort(self._ranking, self._rank(result))
        return result

    def best(self, count: int) -> list[Result]:
        """Return the last results of the best trials, the best first. As in Optuna, completed feasible trials precede
        all others."""
        return [self.results[trial] for _, _, trial in self._ranking[:count]]

    def _rank(self, result: Result) -> tuple[bool, Rank, TrialId]:
        trial = result.trial
        complete = self._ends.get(trial) == "COMPLETE" and trial not in self._infeasible
        return not complete, rank(result.value, trial, maximize=self._maximize), trial
