"""The median stopping rule (Golovin et al., "Google Vizier", KDD 2017, section 3.2.2)."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from hpstage.algorithm import Action, Algorithm, Ask, Finish, Search, Setting, Trials
from hpstage.algos.rungs import check_whole
from hpstage.errors import UsageError


@dataclass(frozen=True)
class MedianStopping(Algorithm):
    """Stops a trial whose best value so far is worse than the median of the others' running averages at that step.

    Golovin et al., "Google Vizier: A Service for Black-Box Optimization", KDD 2017, section 3.2.2. Trials are evaluated
    after ``grace`` steps, every ``interval`` steps from there on, and at the end. A trial's running average is the
    mean of its values up to a step. As in Ray's MedianStoppingRule, and other than in Vizier and in Optuna's
    MedianPruner, which compare with trials that were trained to the end, *others* are all that were told at that step
    before, whatever became of them.

    A value that equals the median goes on. The median of an even number of averages is the mean of the middle two.
    Trials that fail keep what was told of them.

    Synchronous: results are told in the order in which they were asked for, so that each trial is compared with the
    same others on any cluster, and one seed gives the same search. The price is that a slow trial holds up the
    decisions about the others in the window.

    Args:
        interval: steps between evaluations, each of which may stop the trial.
        grace: steps before the first evaluation.
        min_trials: how many others there must be at a step for a trial to be stopped there.
        window: how many trials are open at a time; at least the number of workers, to keep them busy. The wider, the
            fewer trials a trial is compared with.
    """

    interval: int = 1
    grace: int = 1
    min_trials: int = 5
    window: int = 16

    def check(self, setting: Setting) -> None:
        check_whole("interval", self.interval, least=1)
        check_whole("grace", self.grace, least=1)
        check_whole("min_trials", self.min_trials, least=1)
        check_whole("window", self.window, least=1)
        if self.grace >= setting.steps:
            raise UsageError(
                f"grace is {self.grace}, but a trial has {setting.steps} steps, so that none could be stopped; lower "
                f"grace or raise steps of the study"
            )

    def evaluations(self, steps: int) -> list[int]:
        """The steps at which trials are evaluated; the last is the end."""
        return [*range(self.grace, steps, self.interval), steps]

    def start(self, setting: Setting, trials: Trials) -> Search:
        return _MedianSearch(self.evaluations(setting.steps), self.min_trials, self.window, setting.maximize)


@dataclass(slots=True)
class _Curve:
    """What was told of an open trial, in the sense in which less is better."""

    count: int = 0
    total: float = 0.0
    best: float = float("inf")

    def add(self, value: float) -> float:
        """The running average with one more value."""
        self.count += 1
        self.total += value
        self.best = min(self.best, value)
        return self.total / self.count


class _MedianSearch(Search):
    def __init__(self, steps: list[int], min_trials: int, window: int, maximize: bool) -> None:
        self._steps = steps
        self._min_trials = min_trials
        self._window = window
        self._sign = -1.0 if maximize else 1.0
        self._averages: list[list[float]] = [[] for _ in steps]  # sorted
        self._curves: dict[int, _Curve] = {}  # of open trials
        self._added = 0
        self._begun = 0

    def room(self) -> int:
        return max(0, self._window - len(self._curves) - (self._added - self._begun))

    def added(self, index: int) -> list[Action]:
        self._added += 1
        return self._begin()

    def told(self, index: int, step: int, value: float) -> list[Action]:
        curve = self._curves[index]
        level = curve.count
        average = curve.add(self._sign * value)
        others = self._averages[level]
        stop = len(others) >= self._min_trials and curve.best > _median(others)
        insort(others, average)
        if step == self._steps[-1]:
            return self._over(index, [Finish(index, "complete")])
        if stop:
            return self._over(index, [Finish(index, "pruned")])
        return [Ask(index, self._steps[level + 1])]

    def failed(self, index: int) -> list[Action]:
        return self._over(index, [])

    def _over(self, index: int, actions: list[Action]) -> list[Action]:
        del self._curves[index]
        return actions + self._begin()

    def _begin(self) -> list[Action]:
        """Ask for proposed trials, as the window allows.

        A resumed search proposes all its trials at once: those beyond the window wait, so that it is told in the
        order in which the search that was interrupted was.
        """
        actions: list[Action] = []
        while self._begun < self._added and len(self._curves) < self._window:
            self._curves[self._begun] = _Curve()
            actions.append(Ask(self._begun, self._steps[0]))
            self._begun += 1
        return actions


def _median(ordered: list[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
