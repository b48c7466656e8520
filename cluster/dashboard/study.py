"""One study as the page shows it, kept up to date fact by fact. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from hpstage.cluster.dashboard.pieces import PieceState
from hpstage.plan.facts import ChainLost, NodeId, SearchStarted, StateReached, TrialId
from hpstage.plan.nodes import Node, PlannedTrial
from hpstage.plan.plan import SearchPlan
from hpstage.plan.totals import Totals

Activity = Literal["train", "evaluate", "load", "save", "wasted"]
"""What workers spend their time on; ``wasted``: training that was thrown away, whatever it was for."""
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)

_RESULTS = 3000
"""Results drawn as dots: the latest."""
_HISTORY = 800
"""Points of a curve over time; beyond, every second one goes."""


_Rank = tuple[bool, float, int, TrialId]


@dataclass(slots=True)
class Lane:
    """A node as far as the study's trials go along it, ``trials`` of them."""

    study: StudyView
    node: Node
    reach: int
    trials: int = 0
    answered: int = 0  # steps along it of each trial, up to its farthest result
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

    def __init__(self, started: SearchStarted, totals: Totals) -> None:
        self.started = started
        self.ended = False
        self.trials: dict[TrialId, str | None] = {}  # how it ended, if it did
        self.trials_by_end: Counter[str | None] = Counter()
        self.stages: Counter[PieceState] = Counter()  # pieces of lanes by state
        self.lanes: dict[NodeId, Lane] = {}  # parents before children
        self.rungs: dict[int, Rung] = {}
        self.standing: dict[TrialId, Result] = {}  # the farthest of each trial that is a number
        self._ranking: list[_Rank] = []  # of those, the best first
        self.results: deque[Result] = deque(maxlen=_RESULTS)
        self.began = started.at  # the first call
        self.history = History()  # (seconds since then, worker-seconds of the trials alone, spent)
        self.history.add(0.0, 0.0, 0.0)
        self.steps_asked = 0
        self.steps_unique = 0  # distinct ones among them
        self.steps_trained = 0
        self.steps_wasted = 0
        self.seconds: dict[Activity, float] = dict.fromkeys(ACTIVITIES, 0.0)  # of the study's own chains
        self.chains_lost: Counter[str] = Counter()  # by outcome
        self._totals = totals
        self._latest = 0.0
        self._answered: set[tuple[TrialId, int]] = set()
        self._told: dict[TrialId, int] = {}  # the farthest step of them
        self._alone = 0.0  # seconds of training that the results would have taken, each trial alone

    @property
    def name(self) -> str:
        return self.started.study

    @property
    def maximize(self) -> bool:
        return self.started.directions[:1] == ("maximize",)

    @property
    def merge_rate(self) -> float:
        return self.steps_asked / self.steps_unique if self.steps_unique else 1.0

    @property
    def seconds_spent(self) -> float:
        """By the study's own chains."""
        return sum(self.seconds.values())

    @property
    def seconds_alone(self) -> float:
        """That the results so far would have taken, each trial alone (:func:`hpstage.plan.savings.seconds_alone`)."""
        totals = self._totals
        evaluation = totals.evaluate_seconds / totals.evaluations if totals.evaluations else 0.0
        return self._alone + len(self._answered) * evaluation

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

    def ask(self, trial: PlannedTrial, before: int, step: int) -> list[Lane]:
        """``step`` was asked of a trial of which ``before`` was the farthest. Returns lanes that are new."""
        self.rungs.setdefault(step, Rung()).asked += 1
        if step <= before:
            return []
        new = []
        self.steps_asked += step - before
        for node, start, stop in trial.legs(step):
            lane = self.lanes.get(node.id)
            if lane is None:
                lane = self.lanes[node.id] = Lane(self, node, start)
                new.append(lane)
            self.steps_unique += max(0, stop - lane.reach)
            lane.reach = max(lane.reach, stop)
            lane.trials += start >= before
        return new

    def tell(
        self,
        plan: SearchPlan,
        trial: PlannedTrial,
        step: int,
        metrics: Mapping[str, float],
        at: float | None = None,
    ) -> None:
        """A trial's target is reached."""
        if (trial.id, step) in self._answered:
            return  # a call that went on asks again
        self._answered.add((trial.id, step))
        value = metrics.get(self.started.metric[0], math.nan)
        rung = self.rungs.setdefault(step, Rung())
        rung.told += 1
        before = self._told.get(trial.id, 0)
        if math.isfinite(value):
            result = Result(trial.id, step, value)
            if step > before:
                self._stand(trial.id, self.trials.get(trial.id), result)
            self.results.append(result)
            better = rung.best is None or (value > rung.best if self.maximize else value < rung.best)
            rung.best = value if better else rung.best
        if step > before:
            self._told[trial.id] = step
            for node, start, stop in trial.legs(step):
                if stop > before:
                    steps = stop - max(start, before)
                    lane = self.lanes.get(node.id)
                    if lane is not None:  # else it was asked for before the study was heard of
                        lane.answered += steps
                    self._alone += steps * plan.step_seconds(node)
        self._mark(at)

    def repace(self, lane: Lane, faster: float) -> None:
        """The node's seconds per step turned out to be lower by ``faster`` than they were taken to be."""
        self._alone -= lane.answered * faster

    def spend(self, fact: StateReached) -> None:
        """A chain of the study's came to a state."""
        seconds = self.seconds
        seconds["train"] += fact.train_seconds
        seconds["load"] += fact.load_seconds
        seconds["evaluate"] += fact.evaluate_seconds
        seconds["save"] += fact.save_seconds
        self.steps_trained += fact.step - fact.start
        self._mark(fact.at)

    def lose(self, fact: ChainLost) -> None:
        """A chain of the study's was lost, or threw away what it had trained last."""
        self.seconds["wasted"] += fact.seconds
        self.steps_wasted += fact.steps
        self.chains_lost[fact.outcome] += 1
        self._mark(fact.at)

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
