"""Algorithm port: what decides which trial is trained how far, and which trials grow out of others.

An algorithm is a frozen description (``SuccessiveHalving(min_steps=15)``); ``start`` makes a :class:`Search`, the state
machine of one run. A search is pure: it sees trials as indices, numbered in the order in which they were
proposed, asks for *targets* (train trial ``i`` to step ``n`` and evaluate it), is told values, forks trials and
finishes them. Pausing is not asking. Its state is a function of what it was told and of what it looked up, so that an
interrupted search is resumed by telling it again: what was trained before is answered at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


@dataclass(frozen=True, slots=True)
class Ask:
    """Train trial ``index`` to ``step`` and evaluate it there."""

    index: int
    step: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Propose a trial that is trial ``donor`` up to ``step``, and from there on the space's trial under ``params``.

    It comes in addition to the ``n_trials`` that the sampler proposes, and to :meth:`Search.forked`.
    """

    donor: int
    step: int
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finish:
    """Trial ``index`` is over; its result is the last value told.

    ``complete``: it was trained to its last step; ``pruned``: the algorithm gave it up before.
    """

    index: int
    state: Literal["complete", "pruned"]


Action = Ask | Fork | Finish


@dataclass(frozen=True, slots=True)
class Setting:
    """What a search is about.

    ``steps``: of a full trial. ``n_trials``: how many the sampler will propose (``None``: no bound). ``maximize``:
    larger values are better. ``adaptive``: does the sampler learn from results, so that proposals gain by waiting?
    """

    steps: int
    n_trials: int | None
    maximize: bool
    adaptive: bool


class Trials:
    """What a search may look up about its trials. These are trials that have nothing in common and no parameters."""

    def prefix(self, index: int, step: int) -> Hashable:
        """Names what trial ``index`` is trained on up to ``step``: equal for two trials if they are one until there."""
        return index

    def params(self, index: int) -> Mapping[str, tuple[Any, BaseDistribution]]:
        """The trial's parameters as the space asked for them: values, and what they were drawn from."""
        return {}

    def should_prune(self, index: int, step: int) -> bool:
        """Does the study's pruner give the trial up, knowing its values up to ``step``?"""
        return False


class Search(ABC):
    """One run of an algorithm. Values of a synchronous algorithm are told in the order in which it asked."""

    @abstractmethod
    def room(self) -> int:
        """How many trials the sampler may propose now, beyond those that it did."""

    @abstractmethod
    def added(self, index: int) -> list[Action]:
        """The sampler proposed a trial. Indices increase; forks have their own among them."""

    def forked(self, index: int, fork: Fork) -> list[Action]:
        """The trial that ``fork`` asked for is there."""
        raise NotImplementedError(f"{type(self).__name__} was told of a fork that it cannot have asked for")

    @abstractmethod
    def told(self, index: int, step: int, value: float) -> list[Action]:
        """The value of a target (of the first objective, where there are several). Never NaN; may be infinite."""

    @abstractmethod
    def failed(self, index: int) -> list[Action]:
        """The trial failed; what was asked of it will not be told. It is over already."""

    def closed(self) -> list[Action]:
        """No more trials will be proposed (the space is exhausted, or time is up)."""
        return []


class Algorithm(ABC):
    """Description of an algorithm; immutable, with a ``repr`` that tells it from others."""

    @property
    def synchronous(self) -> bool:
        """Are its decisions independent of the order in which results arrive?"""
        return True

    @property
    def multi_objective(self) -> bool:
        """Can it search with several objectives, that is without comparing values?"""
        return False

    @abstractmethod
    def check(self, setting: Setting) -> None:
        """Raise :class:`UsageError`, naming the parameter and the remedy, if it cannot run in this setting."""

    @abstractmethod
    def start(self, setting: Setting, trials: Trials) -> Search: ...
