"""Records the calls of an algorithm during a search, so that an equal search can be started from them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from hpstage.algorithm import Action, Algorithm, Ask, Finish, Fork, Search, Setting, Trials

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


class History(Search):
    """An algorithm's search that records its calls, and the targets, values and ends that follow from them.

    Args:
        trials: its look-ups.
    """

    def __init__(self, algorithm: Algorithm, setting: Setting, trials: Trials) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []  # of the search's methods, in order
        self.open: dict[tuple[int, int], None] = {}  # its targets, in the order in which they were requested
        self.values: dict[int, list[float]] = {}  # reported at each step
        self.last: dict[int, float] = {}  # the latest value of each trial
        self.over: set[int] = set()
        self.is_closed = False
        self.synchronous, self.by_length = algorithm.synchronous, algorithm.by_length
        self.takes_nan = algorithm.takes_nan
        self.look_ups = _LookUps(trials)
        self._algorithm = algorithm
        self._setting = setting
        self._search = algorithm.start(setting, self.look_ups)

    def room(self) -> int:
        return self._search.room()

    def added(self, index: int) -> list[Action]:
        return self._call("added", index)

    def forked(self, index: int, fork: Fork) -> list[Action]:
        return self._call("forked", index, fork)

    def reported(self, index: int, step: int, value: float) -> list[Action]:
        self.open.pop((index, step), None)
        self.values.setdefault(step, []).append(value)
        self.last[index] = value
        return self._call("reported", index, step, value)

    def failed(self, index: int) -> list[Action]:
        self.over.add(index)
        for target in [target for target in self.open if target[0] == index]:
            del self.open[target]
        return self._call("failed", index)

    def closed(self) -> list[Action]:
        self.is_closed = True
        return self._call("closed")

    def resized(self, workers: int) -> list[Action]:
        return self._call("resized", workers)

    def idle(self, workers: int) -> list[Action]:
        return self._call("idle", workers)

    def _call(self, method: str, *given: Any) -> list[Action]:
        self.calls.append((method, given))
        actions: list[Action] = getattr(self._search, method)(*given)
        for action in actions:
            if isinstance(action, Ask):
                self.open[action.index, action.step] = None
            elif isinstance(action, Finish):
                self.over.add(action.index)
        return actions

    def again(self, trials: Trials) -> History:
        """Start an equal search by the same calls. Its look-ups must answer as those of this one did.

        O(calls).
        """
        search = History(self._algorithm, self._setting, trials)
        for method, given in self.calls:
            getattr(search, method)(*given)
        return search


class _LookUps(Trials):
    """The look-ups of a search. They record the decisions of the study's pruner, which may decide otherwise later."""

    def __init__(self, trials: Trials) -> None:
        self.pruned: dict[tuple[int, int], bool] = {}
        self._trials = trials

    def prefix(self, index: int, step: int) -> Hashable:
        return self._trials.prefix(index, step)

    def params(self, index: int) -> Mapping[str, tuple[Any, BaseDistribution]]:
        return self._trials.params(index)

    def should_prune(self, index: int, step: int) -> bool:
        found = self.pruned[index, step] = self._trials.should_prune(index, step)
        return found
