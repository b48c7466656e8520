"""The median stopping rule (Golovin et al., "Google Vizier", KDD 2017, section 3.2.2)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass
from math import isnan
from types import MappingProxyType

from hpstage.algorithm import Search, Setting, Trials
from hpstage.algos.early_stopping import EarlyStoppingAlgorithm, EarlyStoppingSearch
from hpstage.algos.parameters import Window, known
from hpstage.errors.arguments import optional, switch, whole


@dataclass(frozen=True)
class MedianStopping(EarlyStoppingAlgorithm):
    """Stops a trial whose best value so far is worse than the median of the other trials' running averages at the step.

    Golovin et al., "Google Vizier: A Service for Black-Box Optimization", KDD 2017, section 3.2.2. Trials are evaluated
    after ``grace`` steps, every ``interval`` steps from there on, and at the end. A trial's running average is the
    mean of its values up to a step. As in Ray's MedianStoppingRule, and unlike Vizier and Optuna's MedianPruner, which
    compare with fully trained trials, the *others* are all trials reported at that step before, regardless of their
    outcome.

    *Tree-aware* (the default): trials that share their state at a step, since they were trained with the same values up
    to it, are one of the *others* there, and are not compared with each other. The paper's rule treats trials as
    independent draws. In a discrete space many trials begin the same; under that rule, a state shared by many trials
    would count many times in the median, and be compared with itself. If all trials are different, the two rules
    coincide. ``tree_aware=False`` gives the paper's rule in any space.

    A trial whose value equals the median continues. The median of an even number of averages is the mean of the middle
    two. The mean of infinite values of both signs is the worse infinity: a trial that once diverged has the worst
    running average. The values of trials that fail later still count.

    Synchronous: results are reported in the order in which they were requested. On any cluster with the same window,
    each trial is therefore compared with the same others, and one seed gives the same search. The price is that a slow
    trial delays the decisions about the others in the window.

    Args:
        interval: steps between evaluations, each of which may stop the trial.
        grace: steps before the first evaluation.
        min_trials: minimum number of others at a step for a trial to be stopped there.
        window: number of trials open at a time; by default 16, and 4 more for each worker beyond 8 when the search is
            started, to keep them busy. Since it decides which others a trial is compared with, it does not change when
            workers join or leave, nor when a call with other workers resumes the search. The larger the window, the
            fewer others a trial is compared with.
        tree_aware: whether trials that are the same so far count as one of the others.
    """

    interval: int = 1
    grace: int = 1
    min_trials: int = 5
    window: int | None = None
    tree_aware: bool = True

    kinds = MappingProxyType(
        {**EarlyStoppingAlgorithm.kinds, "min_trials": whole(), "window": optional(whole()), "tree_aware": switch}
    )

    def start(self, setting: Setting, trials: Trials) -> Search:
        return _MedianSearch(
            self.evaluations(setting.steps),
            self.min_trials,
            Window(setting, self.window).size,
            known(trials, tree_aware=self.tree_aware),
            maximize=setting.maximize,
        )


@dataclass(slots=True)
class _Curve:
    """The values reported of an open trial, with sign such that less is better."""

    count: int = 0
    total: float = 0.0
    best: float = float("inf")

    def add(self, value: float) -> float:
        self.count += 1
        self.total = _sum(self.total, value)
        self.best = min(self.best, value)
        return self.total / self.count


class _Level:
    """The running averages of the states reported at one step."""

    def __init__(self, step: int, trials: Trials) -> None:
        self._step = step
        self._trials = trials
        self._ordered: list[float] = []
        self._averages: dict[Hashable, float] = {}

    def record(self, index: int, average: float) -> None:
        prefix = self._trials.prefix(index, self._step)
        if prefix not in self._averages:
            self._averages[prefix] = average
            insort(self._ordered, average)

    def median_of_others(self, index: int, *, least: int) -> float | None:
        """Return the median of all states except the trial's own, which must be recorded; ``None`` if there are fewer
        than ``least``."""
        count = len(self._ordered) - 1
        if count < least:
            return None
        skip = bisect_left(self._ordered, self._averages[self._trials.prefix(index, self._step)])
        low, high = (self._ordered[place + (place >= skip)] for place in ((count - 1) // 2, count // 2))
        return low if count % 2 else _sum(low, high) / 2


class _MedianSearch(EarlyStoppingSearch):
    def __init__(self, steps: list[int], min_trials: int, window: int, trials: Trials, *, maximize: bool) -> None:
        super().__init__(steps, window)
        self._min_trials = min_trials
        self._sign = -1.0 if maximize else 1.0
        self._evaluations = [_Level(step, trials) for step in steps]
        self._curves: dict[int, _Curve] = {}

    def should_continue(self, index: int, level: int, value: float) -> bool:
        curve = self._curves.setdefault(index, _Curve())
        evaluation = self._evaluations[level]
        evaluation.record(index, curve.add(self._sign * value))
        median = evaluation.median_of_others(index, least=self._min_trials)
        return median is None or curve.best <= median


def _sum(one: float, other: float) -> float:
    """Return the sum, or the worst possible value for infinities of both signs."""
    total = one + other
    return float("inf") if isnan(total) else total
