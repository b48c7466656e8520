"""Early stopping: trials are evaluated at intervals, a window of them at a time, and stopped individually.

Such algorithms differ only in :meth:`EarlyStoppingSearch.should_continue`, the method to implement.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from types import MappingProxyType

from hpstage.algorithm import Action, Algorithm, Ask, Finish, Search, Setting
from hpstage.errors import UsageError
from hpstage.errors.arguments import whole


class EarlyStoppingAlgorithm(Algorithm):
    """Evaluates trials after ``grace`` steps, every ``interval`` steps from there on, and at the end."""

    interval: int
    grace: int
    window: int | None

    kinds = MappingProxyType({"interval": whole(), "grace": whole(), "window": whole()})

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if self.grace >= setting.steps:
            raise UsageError(
                f"grace is {self.grace}, but a trial has only {setting.steps} steps: none could be stopped. Lower "
                f"grace or raise steps"
            )

    def evaluations(self, steps: int) -> list[int]:
        """Return the steps at which trials are evaluated; the last is the end."""
        return [*range(self.grace, steps, self.interval), steps]


class EarlyStoppingSearch(Search):
    """Keeps ``window`` trials open. Subclasses implement ``should_continue``."""

    def __init__(self, steps: list[int], window: int) -> None:
        self._steps = steps
        self._window = window
        self._levels: dict[int, int] = {}  # the index of the requested evaluation of each open trial
        self._later: deque[int] = deque()  # trials waiting for a place in the window

    @abstractmethod
    def should_continue(self, index: int, level: int, value: float) -> bool:
        """Whether the trial continues to its next evaluation, given the value at ``level``.

        It is also called at the last level, where the result is ignored: the trial is complete.
        """

    def room(self) -> int:
        return self._window - len(self._levels)

    def added(self, index: int) -> list[Action]:
        self._later.append(index)
        return self._begin()

    def reported(self, index: int, step: int, value: float) -> list[Action]:
        level = self._levels[index]
        continues = self.should_continue(index, level, value)
        if step == self._steps[-1]:
            return self._over(index, [Finish(index, "complete")])
        if not continues:
            return self._over(index, [Finish(index, "pruned")])
        self._levels[index] = level + 1
        return [Ask(index, self._steps[level + 1])]

    def failed(self, index: int) -> list[Action]:
        return self._over(index, [])

    def _over(self, index: int, actions: list[Action]) -> list[Action]:
        del self._levels[index]
        return actions + self._begin()

    def _begin(self) -> list[Action]:
        """Request the first evaluation of proposed trials, as far as the window has room.

        A resumed search proposes all its trials at once: those beyond the window wait, so that results are reported in
        the same order as in the interrupted search.
        """
        actions: list[Action] = []
        while self._later and len(self._levels) < self._window:
            index = self._later.popleft()
            self._levels[index] = 0
            actions.append(Ask(index, self._steps[0]))
        return actions
