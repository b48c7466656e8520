"""Algorithm port: decides how far each trial is trained, and which trials are forked from others.

An algorithm is a frozen description (``SuccessiveHalving(min_steps=15)``); ``start`` creates a :class:`Search`, the
state machine of one run. A search is pure: it sees trials as indices, numbered in the order in which they were
proposed, requests *targets* (train trial ``i`` to step ``n`` and evaluate it), receives their values, forks trials and
finishes them. A trial without a request is paused. The state of a search depends only on the reported values and its
look-ups, so that an interrupted search is resumed by replay: targets trained before are answered at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hpstage.errors.arguments import EXACT, Kind, whole
from hpstage.errors.deprecation import deprecated

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


@dataclass(frozen=True, slots=True)
class Ask:
    """Train trial ``index`` to ``step`` and evaluate it there."""

    index: int
    step: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Propose a trial that equals trial ``donor`` up to ``step``, and from there on the space's trial for ``params``.

    The new trial is in addition to the ``n_trials`` that the sampler proposes, and is passed to :meth:`Search.forked`.
    Values outside a parameter's range in the space are clipped to it. If the space rejects ``params``, the
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

    ``steps``: steps of the longest trials. Targets beyond the end of a shorter trial are answered at once with its last
    value; once trained to its end, it is complete, even if the algorithm finishes it as pruned. ``n_trials``: number of
    trials that the sampler will propose (``None``: unlimited). ``maximize``: whether larger values are better.
    ``adaptive``: whether the sampler learns from results, so that later proposals are better informed. ``workers``:
    number of workers when the search was started, even if a later call resumes it; :meth:`Search.resized` receives the
    current number.
    """

    steps: int
    n_trials: int | None
    maximize: bool
    adaptive: bool
    workers: int = 1


class Trials:
    """Look-ups of a search about its trials. In this base class, trials share no steps and have no parameters."""

    def prefix(self, index: int, step: int) -> Hashable:
        """Return an identifier of the training of trial ``index`` up to ``step``, or to the trial's end if it is
        earlier. It is the same for two trials whose training is the same up to there."""
        return index

    def params(self, index: int) -> Mapping[str, tuple[Any, BaseDistribution]]:
        """Return the trial's parameters as suggested in the space: values and their distributions."""
        return {}

    def should_prune(self, index: int, step: int) -> bool:
        """Whether the study's pruner prunes the trial, given its values up to ``step``."""
        return False


class Search(ABC):
    """One run of an algorithm.

    A synchronous algorithm receives values in the order of its requests, or in that of :attr:`Algorithm.by_length`.
    Unless trials fail, at least one must be finished as ``complete``: ``study.best_trial`` ignores pruned ones.
    """

    @abstractmethod
    def room(self) -> int:
        """Return how many more trials the sampler may propose now."""

    @abstractmethod
    def added(self, index: int) -> list[Action]:
        """Handle a trial proposed by the sampler. Indices increase, and forks take indices too."""

    def __init_subclass__(cls) -> None:
        if "told" in vars(cls):  # the method's name until 0.3
            deprecated(f"{cls.__name__}.told", "reported")
            cls.reported = cls.told  # type: ignore[method-assign]
        super().__init_subclass__()

    def told(self, index: int, step: int, value: float) -> list[Action]:
        """The name of :meth:`reported` until 0.3."""
        deprecated(f"{type(self).__name__}.told", "reported")
        return self.reported(index, step, value)

    def forked(self, index: int, fork: Fork) -> list[Action]:
        """Handle the trial created for ``fork``."""
        raise NotImplementedError(f"{type(self).__name__} received a fork that it has not requested")

    @abstractmethod
    def reported(self, index: int, step: int, value: float) -> list[Action]:
        """Handle the value of a target (of the first objective, if there are several). It may be infinite, and NaN if
        :attr:`Algorithm.takes_nan`."""

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
        """Handle ``workers`` idle workers, which have nothing to do since all requested targets are assigned. Called
        only in asynchronous searches, between results."""
        return []


_WHOLE = whole(-EXACT)


class Algorithm(ABC):
    """Description of an algorithm; immutable, with a distinctive ``repr``.

    Pass an instance of a subclass to ``optimize``; to use it on the command line, register the subclass in the
    entry-point group ``hpstage.algorithms``, under its name for ``--algorithm``. Test it with
    :class:`hpstage.testing.AlgorithmContract`.

    Valid parameters are converted to plain Python values, so that a call with NumPy numbers resumes the same search.
    """

    kinds: ClassVar[Mapping[str, Kind]] = MappingProxyType({})
    """The valid values of each parameter, which :meth:`check` enforces. Whole numbers are valid for a parameter that is
    not listed and need no entry."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            with suppress(Exception):  # check() refuses invalid values
                object.__setattr__(self, name, self.kinds.get(name, _WHOLE).read(value))

    @property
    def synchronous(self) -> bool:
        """Whether the algorithm's decisions are independent of the order in which results arrive."""
        return True

    @property
    def by_length(self) -> bool:
        """Whether a synchronous algorithm receives results in the order in which they would arrive if all steps took
        equally long and each target had a worker of its own, instead of in the order of requests. For algorithms that
        request short and long targets together, since the short ones would wait for the long ones."""
        return False

    @property
    def forks(self) -> bool:
        """Whether the algorithm forks trials from others, which requires all trials to have the same length."""
        return False

    @property
    def takes_nan(self) -> bool:
        """Whether NaN before a trial's end is an ordinary value, which :meth:`Search.reported` receives. By default it
        fails the trial, as NaN at the end always does."""
        return False

    @property
    def multi_objective(self) -> bool:
        """Whether the algorithm supports several objectives, that is, does not compare values."""
        return False

    def check(self, setting: Setting) -> None:
        """Raise :class:`UsageError` if the algorithm cannot run in this setting; name the parameter and the remedy."""
        for name, kind in self.kinds.items():
            kind.of(name, getattr(self, name))

    @abstractmethod
    def start(self, setting: Setting, trials: Trials) -> Search: ...
