"""A study as shown on the page, updated with every fact. Pure."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_args

from hpstage.accounting.branch_states import PieceState
from hpstage.accounting.branches import TreeBranch, can_be_drawn, extend
from hpstage.accounting.standings import Result, Standings
from hpstage.accounting.tally import Tally
from hpstage.plan.facts import NodeId, SearchStarted, TrialId
from hpstage.plan.nodes import PlannedTrial

Key = TypeVar("Key", bound=Hashable)


class Changes(Generic[Key]):
    """The keys that were marked, in the order of their last mark."""

    def __init__(self) -> None:
        self._last: dict[Key, int] = {}
        self.position = 0
        """Increases with every mark."""

    def mark(self, key: Key) -> None:
        self.position += 1
        self._last.pop(key, None)
        self._last[key] = self.position

    def since(self, position: int) -> list[Key]:
        """Return the keys marked after a position, in order. O(size of the result)."""
        found = []
        for key in reversed(self._last):
            if self._last[key] <= position:
                break
            found.append(key)
        return found[::-1]


Activity = Literal["train", "evaluate", "load", "save", "wasted"]
"""An activity of workers; ``wasted``: training whose results were discarded."""
ACTIVITIES: tuple[Activity, ...] = get_args(Activity)

_RESULTS = 3000
"""Maximum number of results drawn as dots, the latest ones."""
_HISTORY = 800
"""Maximum number of points of a curve over time. If there are more, every second point is dropped."""


@dataclass(slots=True, kw_only=True)
class StudyBranch(TreeBranch):
    """A branch of a study."""

    study: StudyView
    pieces: tuple[PieceState, ...] = ()  # as last counted


class TimeSeries:
    """Points over time. When there are too many, every second point is dropped."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, ...]] = []
        self._last: list[tuple[float, ...]] = []  # the latest point, if it is not in _kept
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
    """The state of a study over all of its calls."""

    def __init__(self, started: SearchStarted, tally: Tally) -> None:
        self.started = started
        self.totals = tally.sums
        self.trials = tally.ends
        self.trials_by_end = tally.by_end
        self.ended = False
        self.stages: Counter[PieceState] = Counter()  # pieces of branches by state
        self.branches: dict[NodeId, StudyBranch] = {}  # parents before children
        self.standings = Standings(tally)
        self.results: deque[Result] = deque(maxlen=_RESULTS)
        self.reported = 0  # number of results so far
        self.extent: tuple[float, float] | None = None  # the lowest and the highest result that can be drawn
        self.began = started.at  # when the first call started
        self.history = TimeSeries()  # (seconds since then, worker-seconds without sharing, busy worker-seconds)
        self.history.add(0.0, 0.0, 0.0)
        self.chains_lost: Counter[str] = Counter()  # by outcome
        self.longest = started.steps  # maximum number of steps of a trial
        self.branch_changes: Changes[NodeId] = Changes()
        self.trial_changes: Changes[TrialId] = Changes()
        self._latest = 0.0

    @property
    def name(self) -> str:
        return self.started.study

    @property
    def maximize(self) -> bool:
        return self.started.maximize

    def restart(self, started: SearchStarted) -> None:
        """Start a further call, keeping the existing state."""
        self.started = started
        self.ended = False
        self.longest = max(self.longest, started.steps)
        self.standings.restart(maximize=self.maximize)

    def request(self, trial: PlannedTrial, before: int, step: int) -> list[StudyBranch]:
        """Record that ``step`` of a trial is requested, and return the new branches.

        Args:
            before: the last step requested of the trial until now.
        """
        self.standings.request(step)
        self.trial_changes.mark(trial.id)
        return extend(self.branches, trial, before, step, lambda node: StudyBranch(node, node.start, study=self))

    def report(self, trial: PlannedTrial, step: int, metrics: Mapping[str, float]) -> None:
        result = self.standings.report(trial.id, step, metrics.get(self.started.metric[0], math.nan))
        self.trial_changes.mark(trial.id)
        if result is None:
            return
        self.results.append(result)
        self.reported += 1
        value = result.value
        if can_be_drawn(value):
            low, high = self.extent or (value, value)
            self.extent = min(low, value), max(high, value)

    def mark(self, at: float, alone_seconds: float) -> None:
        """Add a point to the history, after a state was reached or a chain was lost.

        Args:
            at: the time.
            alone_seconds: worker-seconds of the results so far without sharing.
        """
        self._latest = max(self._latest, at - self.began)  # reports of several workers are not in order
        self.history.add(self._latest, alone_seconds, self.totals.worker_seconds)


def curve(trial: PlannedTrial, metric: str, stop: int) -> list[tuple[int, float]]:
    """Return the known values of a trial's metric by step, up to ``stop``, including values evaluated for other
    trials."""
    known = ((state.step, state.metrics or {}) for state in trial.states() if state.step <= stop)
    found = ((step, metrics.get(metric, math.nan)) for step, metrics in known)
    return [(step, value) for step, value in found if math.isfinite(value)]
