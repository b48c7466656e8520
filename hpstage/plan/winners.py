"""The states of studies that users would want back, which are therefore never evicted. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isnan

from hpstage.plan.facts import SearchStarted, TrialEnded
from hpstage.plan.nodes import State

Costs = tuple[float, ...]
"""Values of objectives, negated where they are maximized."""


@dataclass(slots=True)
class _OfStudy:
    search: SearchStarted
    leading: tuple[Costs, State] | None = None
    completed: list[tuple[Costs, int, State]] = field(default_factory=list)


class Winners:
    """Of each study: the state with the best value at any step, if there is one objective, and the last states of the
    best completed trials (with several objectives, of those that no other dominates)."""

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
        costs = _costs(own.search, [state.metrics.get(own.search.metric[0], float("nan"))])
        if costs is not None and (own.leading is None or costs < own.leading[0]):
            own.leading = costs, state

    def end(self, ended: TrialEnded, state: State | None) -> None:
        """Consider the last state of a trial. O(best trials of the study)."""
        own = self._of.get(ended.study)
        if own is None or state is None or ended.state != "COMPLETE":
            return
        costs = _costs(own.search, [float(value) for value in ended.values or ()])
        if costs is None or not ended.feasible or any(_dominates(other, costs) for other, _, _ in own.completed):
            return
        own.completed = [found for found in own.completed if not _dominates(costs, found[0])]
        own.completed.append((costs, _number(ended), state))
        if len(costs) == 1 and len(own.completed) > 2:  # of equals, Optuna's storages name the first or the lowest
            own.completed = [own.completed[0], min(own.completed[1:], key=lambda found: found[1])]

    def __iter__(self) -> Iterator[State]:
        for own in self._of.values():
            if own.leading is not None:
                yield own.leading[1]
            for _, _, state in own.completed:
                yield state


def _objectives(search: SearchStarted) -> object:
    return search.metric, search.directions


def _costs(search: SearchStarted, values: list[float]) -> Costs | None:
    """Return values to be minimized; ``None`` if they cannot be compared."""
    if len(values) != len(search.directions) or any(map(isnan, values)):
        return None
    pairs = zip(values, search.directions, strict=True)
    return tuple(-value if direction == "maximize" else value for value, direction in pairs)


def _number(ended: TrialEnded) -> int:
    return int(ended.trial.rpartition("/")[2])


def _dominates(one: Costs, other: Costs) -> bool:
    """Whether ``one`` is nowhere worse, and somewhere better."""
    return one != other and all(mine <= theirs for mine, theirs in zip(one, other, strict=True))
