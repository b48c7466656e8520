"""Code shared by algorithms: the number of trials that are open at a time, rungs, and tree-awareness."""

from __future__ import annotations

from types import MappingProxyType

from hpstage.algorithm import Action, Algorithm, Ask, Search, Setting, Trials
from hpstage.errors import UsageError
from hpstage.errors.arguments import switch, whole

FEW_WORKERS = 8
"""With up to this many workers, the default window is the same, so that a seed gives the same study."""

_LEAST = 16
"""The default window for few workers: enough to merge stages, yet small enough for a sampler to learn from results."""

_EACH, _EACH_ELASTIC = 4, 1
"""How much each further worker adds to the default window, and to an elastic one. Open trials share stages, and trials
of a synchronous search wait until the ones before them have reported. With 3 instead of 4, the makespan of a search
that shares much often exceeds its bound by 10 %."""

MOST = 4096
"""Upper bound of the default window."""


class Window:
    """The number of trials or targets that are open at a time: ``given``, or as many as keep the workers busy.

    Args:
        elastic: whether the window starts smaller, and grows to at most twice its size while workers are idle.
    """

    def __init__(self, setting: Setting, given: int | None, *, elastic: bool = False) -> None:
        self._given = given
        self._elastic = elastic and given is None
        self._more = 0
        self.follow(setting.workers)

    @property
    def size(self) -> int:
        return min(MOST, self._size + self._more) if self._given is None else self._given

    def follow(self, workers: int) -> None:
        """Set the number of workers to keep busy."""
        self._size = _LEAST + (_EACH_ELASTIC if self._elastic else _EACH) * max(0, workers - FEW_WORKERS)
        self._more = min(self._more, self._size)

    def widen(self, idle: int) -> None:
        """Let the window, if it is elastic, grow by one trial for each of ``idle`` workers that have nothing to do."""
        if self._elastic:
            self._more = min(self._size, self._more + idle)


class WindowedSearch(Search):
    """A search that keeps as many targets open at a time as its window allows."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._open = 0

    def room(self) -> int:
        return max(0, self._window.size - self._open)

    def failed(self, index: int) -> list[Action]:
        self._open -= 1
        return self._go_on()

    def resized(self, workers: int) -> list[Action]:
        self._window.follow(workers)
        return self._go_on()

    def idle(self, workers: int) -> list[Action]:
        self._window.widen(workers)
        return self._go_on()

    def _ask(self, index: int, step: int) -> Ask:
        self._open += 1
        return Ask(index, step)

    def _go_on(self) -> list[Action]:
        """Return the actions to take when the window has more room."""
        return []


class RungAlgorithm(Algorithm):
    """An algorithm that compares trials at rungs: at each step ``min_steps * reduction_factor**k`` below the last step,
    and at the last step."""

    min_steps: int
    reduction_factor: int
    tree_aware: bool

    kinds = MappingProxyType({"reduction_factor": whole(2), "min_steps": whole(), "tree_aware": switch})

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if self.min_steps > setting.steps:
            raise UsageError(
                f"min_steps is {self.min_steps}, but a trial has {setting.steps} steps; lower min_steps or raise steps"
            )

    def rungs(self, steps: int) -> list[int]:
        """Return the steps at which trials are compared; the last is the end."""
        rungs = []
        step = self.min_steps
        while step < steps:
            rungs.append(step)
            step *= self.reduction_factor
        return [*rungs, steps]


def known(trials: Trials, *, tree_aware: bool) -> Trials:
    """Return the look-ups for an algorithm: if it is not tree-aware, all trials appear different."""
    return trials if tree_aware else Trials()
