"""Facts about the searches of studies: the trials that they propose and finish."""

from __future__ import annotations

from math import isnan
from typing import Literal

import msgspec

from hpstage.plan.facts.values import Metric, Record, TrialId, UserFailure
from hpstage.schedule import Scalar


class SearchStarted(Record, frozen=True, tag=True):
    """A call of ``optimize`` began to propose trials. The search ends with its :class:`SearchEnded`; until then, a call
    with the same values continues it.

    Attributes:
        study: the study's name; a longer one if another study of that name (with another ``identity``) uses the plan.
        extends: whether the search begins with the trials of the study's last search, to train them further.
        directions: the study's, "maximize" or "minimize", for readers of the plan.
        defaults: values of hyperparameters for trials without them, valid on this plan for ever.
        workers: the number of workers. A call that continues the search keeps it, since some algorithms compare more
            trials if there are more workers.
        continues: whether the search begins with the trials of an interrupted call that had other arguments.
        given: the ``n_trials`` that was passed, if ``n_trials`` here also counts trials that had finished before.
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
    """Where an algorithm forked a trial: it equals ``donor`` up to ``step``, and from there on the trial that the space
    returns for ``params``. Parameters are stored as their ``repr``: JSON has no infinities, and NaN is not equal to
    itself."""

    donor: TrialId
    step: int
    params: dict[str, str]


class TrialProposed(Record, frozen=True, tag=True, omit_defaults=True):
    """The study's trial ``number`` belongs to the current search.

    Attributes:
        number: ``None`` if only the sampler's state has changed: before the first trial, or when a trial ended.
        sampler: the parts of the sampler's state that have changed by the time the trial was proposed. Any part other
            than a ``RandomState`` is JSON.
        fork: set if an algorithm forked the trial from another one.
        extends: the finished trial that this one replaces and continues.
        params: the study's parameters, for readers of the plan without the study. Values that are not JSON scalars are
            stored as their ``repr``.
        noted: names of the attributes that the space has set on the trial.
        rejected: the exception that the space raised instead of returning the trial's schedules.
        stops: whether the space has stopped the study, which makes this trial the last one.
    """

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
