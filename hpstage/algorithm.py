"""Algorithm port: decides how far each trial is trained, and which trials are forked from others.

An algorithm is a frozen description (``SuccessiveHalving(min_steps=15)``); ``start`` creates a :class:`Search`, the
state machine of one run. A search is pure: it sees trials as indices, numbered in the order in which they were
proposed, requests *targets* (train trial ``i`` to step ``n`` and evaluate it), receives their values, forks trials and
finishes them. A trial without a request is paused. The state of a search depends only on the reported values and its
look-ups, so that an interrupted search is resumed by replay: targets trained before are answered at once.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hpstage.errors.arguments import EXACT, Kind, whole

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


@dataclass(frozen=True, slots=True)
class Ask:
    """Train trial ``index`` to ``step`` and evaluate it there."""

    index: int
    step: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Propose a trial that equals trial ``donor`` up to ``step``, and the space's trial under ``params`` from there on.

    It is in addition to the ``n_trials`` that the sampler proposes, and is passed to :meth:`Search.forked`. Values
    outside the range that the space suggests them in are clipped to it. If the space rejects ``params``, the
    ``alternatives`` are tried in order.
    """

    donor: int
    step: int
    params: Mapping[str, Any]
    alternatives: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """Finish trial ``index``; its result is the last value reported.

    ``complete``: it was trained to its last step; ``pruned``: the algorithm stopped it earlier.
    """

    index: int
    state: Literal["complete", "pruned"]


Action = Ask | Fork | Finish


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of a search.

    ``steps``: steps of the longest trials. A trial may be shorter: its targets beyond its end are answered at once, by
    its last value, and once trained to its end it is complete, even if finished as pruned. ``n_trials``: trials that
    the sampler will propose (``None``: unlimited). ``maximize``: whether larger values are better. ``adaptive``:
    whether the sampler learns from results, so that later proposals are better informed. ``workers``: their number when
    the search was started, also where a later call resumes it; :meth:`Search.resized` has that of the moment.
    """

    steps: int
    n_trials: int | None
    maximize: bool
    adaptive: bool
    workers: int = 1


class Trials:
    """Look-ups of a search about its trials. This base class has trials with nothing in common and no parameters."""

    def prefix(self, index: int, step: int) -> Hashable:
        """Identify the training of trial ``index`` up to ``step``: equal for two trials if they are one until there.

        Beyond its end, a trial is identified by all of its training.
        """
        return index

    def params(self, index: int) -> Mapping[str, tuple[Any, BaseDistribution]]:
        """Return the trial's parameters as suggested in the space: values and their distributions."""
        return {}

    def should_prune(self, index: int, step: int) -> bool:
        """Whether the study's pruner prunes the trial, given its values up to ``step``."""
        return False


class Search(ABC):
    """One run of an algorithm. Values of a synchronous algorithm are reported in the order of its requests, or
    :attr:`Algorithm.by_length`.

    Unless trials fail, at least one must be finished as ``complete``: ``study.best_trial`` ignores pruned ones.
    """

    @abstractmethod
    def room(self) -> int:
        """Return how many more trials the sampler may propose now."""

    @abstractmethod
    def added(self, index: int) -> list[Action]:
        """Handle a trial proposed by the sampler. Indices increase, and forks take indices too."""

    def __init_subclass__(cls) -> None:
        if "told" in vars(cls):  # its name until 0.3
            warnings.warn(f"{cls.__name__}.told is deprecated; call it reported", DeprecationWarning, stacklevel=2)
            cls.reported = cls.told  # type: ignore[attr-defined, method-assign]
        super().__init_subclass__()

    def forked(self, index: int, fork: Fork) -> list[Action]:
        """Handle the trial created for ``fork``."""
        raise NotImplementedError(f"{type(self).__name__} received a fork that it has not requested")

    @abstractmethod
    def reported(self, index: int, step: int, value: float) -> list[Action]:
        """Handle the value of a target (of the first objective, if there are several). May be infinite; NaN
        only if :attr:`Algorithm.takes_nan`."""

    @abstractmethod
    def failed(self, index: int) -> list[Action]:
        """Handle the failure of a trial. Return no ``Finish`` for it; its targets will not be reported."""

    def closed(self) -> list[Action]:
        """Handle the end of proposals (the space is exhausted, or time is up)."""
        return []

    def resized(self, workers: int) -> list[Action]:
        """Handle a new number of workers. Not called for each worker that fails and is replaced."""
        return []

    def idle(self, workers: int) -> list[Action]:
        """Handle a number of workers with nothing to do, although all requested targets are assigned. Called only in
        asynchronous searches, between results."""
        return []


_WHOLE = whole(-EXACT)


class Algorithm(ABC):
    """Description of an algorithm; immutable, with a distinctive ``repr``.

    A subclass is registered in the entry-point group ``hpstage.algorithms``, under its name for ``--algorithm``, and
    tested by :class:`hpstage.testing.AlgorithmContract`.

    Parameters of the right kind become plain ones, NumPy's numbers Python's, so that a search is resumed whichever
    were given.
    """

    kinds: ClassVar[Mapping[str, Kind]] = MappingProxyType({})
    """The valid values of its parameters, which :meth:`check` enforces."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            with suppress(Exception):  # what is of another kind is refused by check()
                object.__setattr__(self, name, self.kinds.get(name, _WHOLE).read(value))

    @property
    def synchronous(self) -> bool:
        """Whether the algorithm's decisions are independent of the order in which results arrive."""
        return True

    @property
    def by_length(self) -> bool:
        """Whether the results of a synchronous algorithm are reported in the order in which they would arrive if all
        steps took equally long and there were a worker for each target, instead of in that of requests: for one with
        parts whose targets lie far apart, which would wait for each other."""
        return False

    @property
    def forks(self) -> bool:
        """Whether the algorithm forks trials from others, which requires all to be of one length."""
        return False

    @property
    def takes_nan(self) -> bool:
        """Whether NaN before a trial's end is a value like others, which :meth:`Search.reported` receives. By default
        it fails the trial, as NaN at the end always does."""
        return False

    @property
    def multi_objective(self) -> bool:
        """Whether the algorithm supports several objectives, that is, does not compare values."""
        return False

    def check(self, setting: Setting) -> None:
        """Raise :class:`UsageError`, naming the parameter and the remedy, if it cannot run in this setting."""
        for name, kind in self.kinds.items():
            kind.of(name, getattr(self, name))

    @abstractmethod
    def start(self, setting: Setting, trials: Trials) -> Search: ...
