"""How many trials are open at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpstage.algorithm import Setting

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
