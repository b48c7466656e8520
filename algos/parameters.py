"""How many trials are open at a time."""

from __future__ import annotations

from hpstage.algorithm import Action, Ask, Search, Setting

FEW_WORKERS = 8
"""With up to so many workers the default is one number, so that a seed gives one study on any of these fleets."""

_LEAST = 16
"""Trials open at a time then: enough to merge stages, and few for a sampler that learns from what is known."""

_EACH, _EACH_ELASTIC = 4, 1
"""Further ones for each further worker. Open trials share stages, and those of a synchronous search wait until the ones
before them are reported: with 3, makespans of searches that share much often exceed their bound by 10 %."""

MOST = 4096
"""The largest default."""


class Window:
    """How many trials or targets are open at a time: ``given``, or else as many as keep the workers busy.

    Args:
        elastic: whether it is narrower at first, and widens, up to twice its size, while workers have nothing to do.
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
        """Keep so many workers busy from now on."""
        self._size = _LEAST + (_EACH_ELASTIC if self._elastic else _EACH) * max(0, workers - FEW_WORKERS)
        self._more = min(self._more, self._size)

    def widen(self, idle: int) -> None:
        """Make room for so many workers that have nothing to do."""
        if self._elastic:
            self._more = min(self._size, self._more + idle)


class WindowedSearch(Search):
    """Has as many targets open at a time as a window allows."""

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
        """Return what follows from that there is more room."""
        return []
