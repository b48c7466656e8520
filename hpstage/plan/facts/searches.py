"""Facts about the searches of studies: the trials that they propose and finish."""

from __future__ import annotations

from math import isnan
from typing import Literal

import msgspec

from hpstage.plan.facts.values import Metric, Record, TrialId, UserFailure
from hpstage.schedule import Scalar


class SearchStarted(Record, frozen=True, tag=True):
    """A call of ``optimize`` began to propose trials. ``study``: its name, or a longer one where another study of that
    name (with another ``identity``) uses the plan. The search ends with its :class:`SearchEnded`; until then a call
    with the same values continues it. With ``extends`` it takes over the trials of the study's last search.
    ``directions`` are the study's, "maximize" or "minimize", for readers of the plan. ``defaults``: the value that
    a hyperparameter has in trials without it, on this plan for ever. ``workers``: their number, which a call that
    continues keeps: some algorithms compare more trials with more workers. ``continues``: it takes over the trials of
    an interrupted call under other arguments; ``given``: the ``n_trials`` of that call, if fewer than all its trials.
    """

    study: str
    algorithm: str
    metric: tuple[str, ...]
    steps: int
    n_trials: int | None
    sampler: str
    at: float
    extends: bool = False
    identity: str = ""
    directions: tuple[str, ...] = ()
    defaults: dict[str, Scalar] = msgspec.field(default_factory=dict)
    workers: int = 1
    continues: bool = False
    given: int | None = None

    @property
    def maximize(self) -> bool:
        """Whether the first objective is maximized."""
        return self.directions[:1] == ("maximize",)

    def differs(self, other: SearchStarted) -> list[str]:
        """Return the arguments in which another call of the study differs."""
        arguments = {"algorithm", "metric", "steps", "n_trials", "sampler", "extends", "identity", "defaults"}
        return sorted(name for name in arguments if getattr(self, name) != getattr(other, name))

    def same_call(self, other: SearchStarted) -> bool:
        return self.study == other.study and not self.differs(other)


class RandomState(Record, frozen=True):
    """A NumPy ``RandomState``; ``key`` (base64) is omitted where it equals that of the previously recorded state."""

    pos: int
    has_gauss: int
    gauss: float
    key: str | None


class ForkedFrom(Record, frozen=True):
    """A trial equals ``donor`` up to ``step`` and the space's trial under ``params`` from there on. Parameters are
    stored as their ``repr``: JSON has no infinities, and NaN is not equal to itself."""

    donor: TrialId
    step: int
    params: dict[str, str]


class TrialProposed(Record, frozen=True, tag=True, omit_defaults=True):
    """The study's trial ``number`` belongs to the current search; ``sampler`` holds what has changed of the sampler's
    state after it was proposed (or, if ``number`` is None, before the first, or after the end of one): of other parts
    than a ``RandomState``, as JSON.

    ``fork``: set if an algorithm forked it from another trial. ``extends``: the finished trial that it replaces and
    continues. ``params`` are the study's, for readers of the plan without the study: values that are not JSON scalars
    are stored as their ``repr``. ``noted``: the attributes that the space has set on it. ``rejected``: what the
    space raised instead of describing it. ``stops``: the space has stopped the study, so that it is the last one."""

    study: str
    number: int | None
    trial: TrialId | None
    sampler: dict[str, RandomState | str]
    fork: ForkedFrom | None = None
    extends: TrialId | None = None
    params: dict[str, bool | int | float | str | None] = msgspec.field(default_factory=dict)
    noted: tuple[str, ...] = ()
    rejected: UserFailure | None = None
    stops: bool = False


class TrialEnded(Record, frozen=True, tag=True, omit_defaults=True):
    """The study has finished a trial: no more steps are requested. This affects only which states are kept and what is
    shown.

    ``values``: the last reported values, one per metric of the search, as in :data:`Metrics`; ``step``: the farthest
    step requested; ``feasible``: whether it satisfies the constraints of the study's sampler, if that has any."""

    study: str
    trial: TrialId
    state: Literal["COMPLETE", "PRUNED", "FAIL"]
    values: tuple[Metric, ...] | None
    step: int
    at: float
    feasible: bool = True

    @property
    def objectives(self) -> tuple[float, ...] | None:
        """The values of a completed trial; ``None`` if it has none, or one is NaN."""
        if self.state != "COMPLETE" or not self.values:
            return None
        values = tuple(map(float, self.values))
        return None if any(map(isnan, values)) else values


class SearchEnded(Record, frozen=True, tag=True):
    study: str
    at: float
