"""The best states of each study, which are never evicted. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from operator import le

from hpstage.plan.facts import SearchStarted, TrialEnded, TrialId, number_of
from hpstage.plan.nodes import PlannedTrial, State

Costs = tuple[float, ...]
"""Values of objectives, negated where they are maximized."""

_Completed = tuple[Costs, int, State]
"""A completed trial: its costs, its number and its last state."""


@dataclass(slots=True)
class _OfStudy:
    search: SearchStarted
    leading: tuple[Costs, State] | None = None
    completed: list[_Completed] = field(default_factory=list)


class Winners:
    """The winners of each study: the state with the best value at any step, if there is one objective, and the last
    states of the best completed trials (with several objectives, of all that no other trial dominates)."""

    def __init__(self) -> None:
        self._of: dict[str, _OfStudy] = {}

    def begin(self, search: SearchStarted) -> None:
        """Begin a search, which continues with the winners of the study's last one if it has the same objectives."""
        last = self._of.get(search.study)
        if last is None or _objectives(last.search) != _objectives(search):
            self._of[search.study] = _OfStudy(search)

    def answer(self, study: str, state: State) -> None:
        """Consider an evaluated state of one of the study's trials. O(1)."""
        own = self._of.get(study)
        if own is None or len(own.search.metric) != 1 or state.metrics is None:
            return
        costs = costs_of(own.search, [state.metrics.get(own.search.metric[0], float("nan"))])
        if costs is not None and (own.leading is None or costs < own.leading[0]):
            own.leading = costs, state

    def end(self, ended: TrialEnded, state: State | None) -> None:
        """Add the last state of a completed, feasible trial to the study's winners unless one of them dominates it.

        O(winners of the study).
        """
        own = self._of.get(ended.study)
        if own is None or state is None or ended.objectives is None or not ended.feasible:
            return
        costs = costs_of(own.search, ended.objectives)
        if costs is not None and not any(dominates(other, costs) for other, _, _ in own.completed):
            own.completed = _with(own.completed, (costs, number_of(ended.trial), state))

    def to_come(self, trained: Iterable[tuple[str, TrialId, State]]) -> Iterator[State]:
        """Yield the states that may be winners once the ends of fully trained trials are recorded.

        ``trained``: the study, the id and the last state of each of these trials.
        """
        completed: dict[str, list[_Completed]] = {}
        for study, trial, state in trained:
            own = self._of.get(study)
            if own is None or state.metrics is None:
                continue
            if not state.metrics.keys() >= {*own.search.metric}:
                yield state  # an objective is not one of the metrics: hpstage measures it
                continue
            costs = costs_of(own.search, [state.metrics[name] for name in own.search.metric])
            best = completed.setdefault(study, own.completed)
            if costs is not None and not any(dominates(other, costs) for other, _, _ in best):
                completed[study] = _with(best, (costs, number_of(trial), state))
        for best in completed.values():
            for _, _, state in best:
                yield state

    def __iter__(self) -> Iterator[State]:
        for own in self._of.values():
            if own.leading is not None:
                yield own.leading[1]
            for _, _, state in own.completed:
                yield state


Rank = tuple[float, int, str]


def rank(value: float, trial: TrialId, *, maximize: bool) -> Rank:
    """Return a key that sorts trials by their values, best first; equal ones by ascending number."""
    name = trial.rpartition("/")[2]  # a number, except in a store that others have written
    return -value if maximize else value, len(name), name


def best_first(values: Mapping[TrialId, tuple[float, ...]], search: SearchStarted) -> list[TrialId]:
    """Return trials in the order of their first objective, best first; equal ones by ascending number.

    ``values``: those of the objectives, by trial.
    """
    return sorted(values, key=lambda id: rank(values[id][0], id, maximize=search.maximize))


def best_state(trial: PlannedTrial, search: SearchStarted) -> tuple[float, int] | None:
    """Return the best value of the first objective on a trial's path up to the steps requested, and the step at which
    it was measured: the first of equals. ``None`` if there is none."""
    sign = -1.0 if search.maximize else 1.0
    found = [
        (sign * value, state.step)
        for state in trial.states()
        if state.step <= trial.requested and state.metrics is not None
        if not isnan(value := state.metrics.get(search.metric[0], float("nan")))
    ]
    value, step = min(found, default=(0.0, 0))
    return (sign * value, step) if found else None


def costs_of(search: SearchStarted, values: Sequence[float]) -> Costs | None:
    """Return values to be minimized; ``None`` if they cannot be compared."""
    if len(values) != len(search.directions) or any(map(isnan, values)):
        return None
    pairs = zip(values, search.directions, strict=True)
    return tuple(-value if direction == "maximize" else value for value, direction in pairs)


def dominates(one: Costs, other: Costs) -> bool:
    """Whether ``one`` is nowhere worse, and somewhere better."""
    return one != other and all(map(le, one, other))


def _objectives(search: SearchStarted) -> object:
    return search.metric, search.directions


def _with(completed: list[_Completed], new: _Completed) -> list[_Completed]:
    """Return the best of completed trials and of a new one that none of them dominates."""
    best = [found for found in completed if not dominates(new[0], found[0])]
    best.append(new)
    if len(new[0]) == 1 and len(best) > 2:  # Optuna's storages return the first or the lowest-numbered of equal trials
        return [best[0], min(best[1:], key=lambda found: found[1])]
    return best
