"""Schedules that metrics decide: trials are trained from one decision to the next.

A trial with a plateau (``schedule/plateau.py``) begins with a schedule that stays constant. Its state at each look is
evaluated, and ``ReduceOnPlateau`` decides from the metric. If the value is reduced, the trial is added to the plan
again, with the schedule as decided so far: from that step on it follows another branch. Then the next target is
requested.
"""

from __future__ import annotations

import dataclasses
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from hpstage.driver.driver import Driver
from hpstage.errors import UsageError
from hpstage.plan.facts import TrialAdded, TrialId
from hpstage.plan.nodes import PlannedTrial
from hpstage.schedule import Plateau, Scalar, Schedule
from hpstage.schedule.plateau import Mode, ReduceOnPlateau
from hpstage.schedule.space import Described, with_defaults
from hpstage.scheduler.answers import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The metrics that the schedules of a search may observe.

    Args:
        rising: by objective of the study, in order, whether larger values are better.
        noisy: metrics that also depend on the machine, such as durations.
        forks: whether the algorithm forks trials from one another.
        defaults: values of hyperparameters that trials lack.
    """

    rising: Mapping[str, bool]
    noisy: tuple[str, ...]
    forks: bool
    defaults: Mapping[str, Scalar]

    def by(self, described: Described, trial: str) -> Described:
        """Return a trial with defaults for the hyperparameters that it lacks, and with plateaus that name the metric
        that they observe.

        Raises:
            UsageError: a plateau is impossible here. The message names the trial, the hyperparameter and the remedy.
        """
        bound = {name: self._of(plateau, trial, name) for name, plateau in described.plateaus.items()}
        return dataclasses.replace(with_defaults(described, self.defaults), plateaus=bound)

    def _of(self, plateau: Plateau, trial: str, name: str) -> Plateau:
        metric = plateau.metric or next(iter(self.rising))
        who = f"{trial}, hyperparameter {name!r}"
        if self.forks:
            raise UsageError(
                f"{who}: a schedule that a metric decides cannot be forked by an algorithm that changes schedules "
                f"itself; use another algorithm"
            )
        if metric.startswith("hpstage:") or metric in self.noisy:
            raise UsageError(
                f"{who}: {metric!r} measures the machine as well as the model, so another run would decide "
                f"differently; give s.plateau(metric=...) a metric of the model alone"
            )
        default: Mode = "max" if self.rising.get(metric, False) else "min"
        return msgspec.structs.replace(plateau, metric=metric, mode=plateau.mode or default)


@dataclass(slots=True)
class _Open:
    """A trial with schedules that are not yet decided up to its end."""

    reducers: Mapping[str, ReduceOnPlateau]
    looks: deque[int]  # steps after which a schedule is still to be decided
    waiting: list[int] = field(default_factory=list)  # targets beyond the next look, ascending


class PlateauTargets:
    """Requests targets from the driver, each of them once the trial's schedules are decided up to it.

    Decisions are a function of the metrics in the plan: an interrupted search decides the same again.

    Args:
        add: adds a trial again, with schedules that have changed.
    """

    def __init__(self, driver: Driver, add: Callable[[TrialAdded], None]) -> None:
        self._driver = driver
        self._add = add
        self._open: dict[TrialId, _Open] = {}

    def looks(self, trial: PlannedTrial, after: int, stop: int) -> set[int]:
        """Return the steps between the targets ``after`` and ``stop`` after which a schedule is decided."""
        return {at for plateau in trial.plateaus.values() for at in plateau.looks(stop) if at > after}

    def ask(self, trial: TrialId, steps: Iterable[int]) -> None:
        planned = self._driver.plan.trials[trial]
        if not planned.plateaus:
            for step in steps:
                self._driver.ask(trial, step)
            return
        open = self._open.get(trial)
        if open is None:
            looks = self.looks(planned, 0, planned.steps)
            open = _Open({name: ReduceOnPlateau(one) for name, one in planned.plateaus.items()}, deque(sorted(looks)))
            self._open[trial] = open
        for step in steps:
            insort(open.waiting, step)
        self._request(trial, open)

    def take(self, answer: Answer) -> list[Answer]:
        """Make the decisions that an answer allows, and request the targets that waited for them. If the trial has
        failed, return answers to the targets that are still waiting."""
        open = self._open.get(answer.trial)
        if open is None:
            return []
        if answer.failure is not None:
            cancelled, open.waiting = open.waiting, []
            return [dataclasses.replace(answer, step=step) for step in cancelled]
        if answer.ending is not None:
            open.looks.clear()
        self._request(answer.trial, open)
        return []

    def _request(self, trial: TrialId, open: _Open) -> None:
        """Request the waiting targets up to the next look. The search requests the looks themselves (:meth:`looks`), as
        steps on the way to its targets."""
        self._decide(trial, open)
        while open.waiting and (not open.looks or open.waiting[0] <= open.looks[0]):
            self._driver.ask(trial, open.waiting.pop(0))

    def _decide(self, trial: TrialId, open: _Open) -> None:
        planned = self._driver.plan.trials[trial]
        while open.looks:
            at = open.looks[0]
            state = self._driver.plan.known(trial, at)
            if state is None or state.metrics is None:
                return
            open.looks.popleft()
            decided: dict[str, Schedule] = {}
            for name, reducer in open.reducers.items():
                looks = at in reducer.plateau.looks(planned.steps)
                if looks and reducer.see(at, _metric(state.metrics, reducer, name)):
                    schedule = reducer.schedule().until(planned.steps)
                    # An earlier call may have written this decision, and later ones.
                    if schedule.value(at) != planned.schedules[name].value(at):
                        decided[name] = schedule
            if decided:
                schedules = {**planned.schedules, **decided}
                self._add(TrialAdded(trial, schedules, planned.steps, planned.keep_at, dict(planned.plateaus)))


def _metric(metrics: Mapping[str, float], reducer: ReduceOnPlateau, name: str) -> float:
    metric = reducer.plateau.metric
    assert metric is not None
    if metric not in metrics:
        there = ", ".join(map(repr, sorted(metrics))) or "nothing"
        raise UsageError(
            f"evaluate() returned {there}, but the schedule of {name!r} depends on {metric!r}; let "
            f"s.plateau(metric=...) name a metric that it returns"
        )
    return metrics[metric]
