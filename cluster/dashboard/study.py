"""One study as the page shows it, kept up to date fact by fact. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from hpstage.cluster.dashboard.pieces import PieceState
from hpstage.plan.facts import ChainLost, NodeId, SearchStarted, TrialId
from hpstage.plan.nodes import PlannedTrial
from hpstage.plan.plan import SearchPlan
from hpstage.plan.tally import StudyTotals
from hpstage.report.lanes import Lane, extend

Activity = Literal["train", "evaluate", "load", "save", "wasted"]
"""What workers spend their time on; ``wasted``: training that was thrown away, whatever it was for."""
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)

_RESULTS = 3000
"""Results drawn as dots: the latest."""
_HISTORY = 800
"""Points of a curve over time; beyond, every second one goes."""


_Rank = tuple[bool, float, int, TrialId]


@dataclass(slots=True, kw_only=True)
class StudyLane(Lane):
    """A lane of a study's."""

    study: StudyView
    pieces: tuple[PieceState, ...] = ()  # as they are counted
    values: str = ""  # the hyper-parameters as text, once they were drawn


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

    def __init__(self, started: SearchStarted, totals: StudyTotals) -> None:
        self.started = started
        self.totals = totals
        self.ended = False
        self.trials: dict[TrialId, str | None] = {}  # how it ended, if it did
        self.trials_by_end: Counter[str | None] = Counter()
        self.stages: Counter[PieceState] = Counter()  # pieces of lanes by state
        self.lanes: dict[NodeId, StudyLane] = {}  # parents before children
        self.rungs: dict[int, Rung] = {}
        self.standing: dict[TrialId, Result] = {}  # the farthest of each trial that is a number
        self._ranking: list[_Rank] = []  # of those, the best first
        self.results: deque[Result] = deque(maxlen=_RESULTS)
        self.began = started.at  # the first call
        self.history = History()  # (seconds since then, worker-seconds of the trials alone, spent)
        self.history.add(0.0, 0.0, 0.0)
        self.chains_lost: Counter[str] = Counter()  # by outcome
        self._latest = 0.0

    @property
    def name(self) -> str:
        return self.started.study

    @property
    def maximize(self) -> bool:
        return self.started.directions[:1] == ("maximize",)

    def restart(self, started: SearchStarted) -> None:
        """A further call: what was there stays."""
        self.started = started
        self.ended = False
        self._ranking = sorted(map(self._rank, self.standing.values()))

    def set_trial(self, trial: TrialId, end: str | None) -> None:
        """How it ended; ``None``: it is not over."""
        if trial in self.trials:
            self.trials_by_end[self.trials[trial]] -= 1
        self._stand(trial, end, self.standing.get(trial))
        self.trials_by_end[end] += 1

    def ask(self, trial: PlannedTrial, before: int, step: int) -> list[StudyLane]:
        """``step`` was asked of a trial of which ``before`` was the farthest. Returns lanes that are new."""
        self.rungs.setdefault(step, Rung()).asked += 1
        return extend(self.lanes, trial, before, step, lambda node: StudyLane(node, node.start, study=self))

    def tell(self, trial: PlannedTrial, step: int, metrics: Mapping[str, float]) -> None:
        """A trial's target is reached, for the first time."""
        value = metrics.get(self.started.metric[0], math.nan)
        rung = self.rungs.setdefault(step, Rung())
        rung.told += 1
        if not math.isfinite(value):
            return
        result = Result(trial.id, step, value)
        standing = self.standing.get(trial.id)
        if standing is None or step > standing.step:
            self._stand(trial.id, self.trials.get(trial.id), result)
        self.results.append(result)
        better = rung.best is None or (value > rung.best if self.maximize else value < rung.best)
        rung.best = value if better else rung.best

    def lose(self, fact: ChainLost, plan: SearchPlan) -> None:
        """A chain was lost, or threw away what it had trained last, and the study pays for it."""
        self.chains_lost[fact.outcome] += 1
        self.mark(fact.at, plan)

    def mark(self, at: float, plan: SearchPlan) -> None:
        """Something was reached or lost."""
        self._latest = max(self._latest, at - self.began)  # reports of several workers come out of order
        self.history.add(self._latest, self.totals.alone_seconds(plan.totals), self.totals.worker_seconds)

    def best(self, count: int) -> list[Result]:
        """The best standing results, the best first; as in Optuna, before all others those of completed trials."""
        return [self.standing[trial] for _, _, _, trial in self._ranking[:count]]

    def _stand(self, trial: TrialId, end: str | None, result: Result | None) -> None:
        """A trial's end or its farthest result is another now."""
        before = self.standing.get(trial)
        if before is not None:
            del self._ranking[bisect_left(self._ranking, self._rank(before))]
        self.trials[trial] = end
        if result is not None:
            self.standing[trial] = result
            insort(self._ranking, self._rank(result))

    def _rank(self, result: Result) -> _Rank:
        sign = -1 if self.maximize else 1
        return self.trials[result.trial] != "COMPLETE", sign * result.value, len(result.trial), result.trial


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
