"""Algorithm port: what decides which trial is trained how far.

An algorithm is a frozen description (``SuccessiveHalving(min_steps=15)``); ``start`` makes a :class:`Search`, the state
machine of one run. A search is pure: it sees trials as indices 0, 1, 2, ... in the order in which they were
proposed, asks for *targets* (train trial ``i`` to step ``n`` and evaluate it), is told values, and finishes trials.
Pausing is not asking. Its state is a function of what it was told, so that an interrupted search is resumed by
telling it again: what was trained before is answered at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Ask:
    """Train trial ``index`` to ``step`` and evaluate it there."""

    index: int
    step: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Trial ``index`` is over; its result is the last value told."""

    index: int
    state: Literal["complete", "pruned"]


Action = Ask | Finish


@dataclass(frozen=True, slots=True)
class Setting:
    """What a search is about.

    ``steps``: of a full trial. ``n_trials``: how many will be proposed (``None``: no bound). ``maximize``: larger
    values are better. ``adaptive``: does the sampler learn from results, so that proposals gain by waiting?
    """

    steps: int
    n_trials: int | None
    maximize: bool
    adaptive: bool


class Search(ABC):
    """One run of an algorithm. Values of a synchronous algorithm are told in the order in which it asked."""

    @abstractmethod
    def room(self) -> int:
        """How many trials may be proposed now, beyond those that were."""

    @abstractmethod
    def added(self, index: int) -> list[Action]:
        """A trial was proposed; indices come in order."""

    @abstractmethod
    def told(self, index: int, step: int, value: float) -> list[Action]:
        """The value of a target. Never NaN."""

    @abstractmethod
    def failed(self, index: int) -> list[Action]:
        """The trial failed; what was asked of it will not be told. It is over already."""

    def closed(self) -> list[Action]:
        """No more trials will be proposed (the space is exhausted, or time is up)."""
        return []


class Algorithm(ABC):
    """Description of an algorithm; immutable, with a ``repr`` that tells it from others."""

    synchronous: bool = True
    """Are its decisions independent of the order in which results arrive?"""

    @abstractmethod
    def check(self, setting: Setting) -> None:
        """Raise :class:`UsageError`, naming the parameter and the remedy, if it cannot run in this setting."""

    @abstractmethod
    def start(self, setting: Setting) -> Search: ...
