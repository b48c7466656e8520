"""One study as the page shows it, kept up to date fact by fact. Pure."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from hpstage.events import NodeId, SearchStarted, TrialId
from hpstage.nodes import PlannedTrial
from hpstage.plan import SearchPlan
from hpstage.report.lanes import Lane, extend

_RESULTS = 3000
"""Results drawn as dots: the latest."""
_HISTORY = 800
"""Points of a curve over time; beyond, every second one goes."""


@dataclass(slots=True)
class Rung:
    """A step at which trials are evaluated."""

    asked: int = 0
    told: int = 0
    best: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    trial: TrialId
    step: int
    value: float


class History:
    """Points over time, of which every second one goes when they become too many."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, ...]] = []
        self._last: list[tuple[float, ...]] = []  # the latest, where it is not among those kept
        self._every = 1
        self._seen = 0

    @property
    def points(self) -> list[tuple[float, ...]]:
        return self._kept + self._last

    def add(self, *point: float) -> None:
        if self._seen % self._every:
            self._last = [point]
        else:
            self._kept.append(point)
            self._last = []
        self._seen += 1
        if len(self._kept) > _HISTORY:
            self._kept = self._kept[::2]
            self._every *= 2


class StudyView:
    """All calls of a study together."""

    def __init__(self, started: SearchStarted) -> None:
        self.started = started
        self.ended = False
        self.trials: dict[TrialId, str | None] = {}  # how it ended, if it did
        self.lanes: dict[NodeId, Lane] = {}  # parents before children
        self.rungs: dict[int, Rung] = {}
        self.standing: dict[TrialId, Result] = {}  # the farthest of each trial that is a number
        self.results: deque[Result] = deque(maxlen=_RESULTS)
        self.began = started.at  # the first call
        self.history = History()  # (seconds since then, worker-seconds of the trials alone, spent)
        self.history.add(0.0, 0.0, 0.0)
        self.steps_asked = 0
        self.steps_unique = 0  # distinct ones among them
        self.steps_trained = 0
        self.seconds_alone = 0.0  # that the results so far would have taken, each trial alone
        self.seconds_spent = 0.0  # by the study's own chains
        self._latest = 0.0
        self._told: dict[TrialId, int] = {}  # the farthest step that was told of

    @property
    def name(self) -> str:
        return self.started.study

    @property
    def maximize(self) -> bool:
        return self.started.directions[:1] == ("maximize",)

    @property
    def merge_rate(self) -> float:
        return self.steps_asked / self.steps_unique if self.steps_unique else 1.0

    def restart(self, started: SearchStarted) -> None:
        """A further call: what was there stays."""
        self.started = started
        self.ended = False

    def ask(self, trial: PlannedTrial, before: int, step: int) -> None:
        """``step`` was asked of a trial of which ``before`` was the farthest."""
        self.rungs.setdefault(step, Rung()).asked += 1
        if step <= before:
            return
        self.steps_asked += step - before
        self.steps_unique += extend(self.lanes, trial, before, step)

    def tell(
        self,
        plan: SearchPlan,
        trial: PlannedTrial,
        step: int,
        metrics: Mapping[str, float],
        at: float | None = None,
    ) -> None:
        """A trial's target is reached."""
        before = self._told.get(trial.id, 0)
        if step <= before:
            return  # a call that went on asks again
        self._told[trial.id] = step
        value = metrics.get(self.started.metric[0], math.nan)
        rung = self.rungs.setdefault(step, Rung())
        rung.told += 1
        if math.isfinite(value):
            result = Result(trial.id, step, value)
            self.standing[trial.id] = result
            self.results.append(result)
            better = rung.best is None or (value > rung.best if self.maximize else value < rung.best)
            rung.best = value if better else rung.best
        totals = plan.totals
        self.seconds_alone += totals.evaluate_seconds / totals.evaluations if totals.evaluations else 0.0
        self.seconds_alone += sum(
            (stop - max(start, before)) * plan.step_seconds(node)
            for node, start, stop in trial.legs(step)
            if stop > before
        )
        self._mark(at)

    def spend(self, seconds: float, at: float, *, steps: int = 0) -> None:
        """A chain of the study's took ``seconds`` on its worker."""
        self.seconds_spent += seconds
        self.steps_trained += steps
        self._mark(at)

    def best(self, count: int) -> list[Result]:
        """The best standing results, the best first; as in Optuna, before all others those of completed trials."""
        sign = -1 if self.maximize else 1

        def order(result: Result) -> tuple[bool, float, int, str]:
            return self.trials[result.trial] != "COMPLETE", sign * result.value, len(result.trial), result.trial

        return heapq.nsmallest(count, self.standing.values(), key=order)

    def _mark(self, at: float | None) -> None:
        if at is not None:
            self._latest = max(self._latest, at - self.began)  # reports of several workers come out of order
            self.history.add(self._latest, self.seconds_alone, self.seconds_spent)


def curve(trial: PlannedTrial, metric: str, stop: int) -> list[tuple[int, float]]:
    """What is known of a trial's metric up to ``stop``, by step: whoever has had it evaluated."""
    found = []
    for node, start, end in trial.legs(stop):
        for step in sorted(step for step in node.states if start < step <= end):
            metrics = node.states[step].metrics
            value = math.nan if metrics is None else metrics.get(metric, math.nan)
            if math.isfinite(value):
                found.append((step, value))
    return found
