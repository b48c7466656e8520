"""Facts: what the journal remembers of a search, and the values that they are made of.

All are frozen ``msgspec`` structs: tagged, validated on decoding, JSON all the way, never pickle.
Seconds are wall-clock durations; ``at`` is a time on the executor's clock (seconds since the epoch, or virtual).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NewType

import msgspec

from hpstage.schedule import Schedule

NodeId = NewType("NodeId", int)
"""Position of a node in the plan, in order of creation. Equal for everyone who folds the same journal."""
TrialId = NewType("TrialId", str)
"""Names a trial within a plan: ``"<study name>/<number>"``."""
WorkerId = NewType("WorkerId", str)
DriverId = NewType("DriverId", str)
"""Names a driver: one process's part in a plan, from when it joins until it leaves or its lease runs out."""
ChainId = NewType("ChainId", str)
StateKey = NewType("StateKey", str)
"""Names for ever what training has produced: 32 hex digits (see ``keys.py``)."""
Metrics = dict[str, float | str]
"""Metrics as they travel: JSON has no NaN and no infinities, so these are texts (``"nan"``, ``"inf"``, ``"-inf"``)."""


def to_metrics(numbers: Mapping[str, float]) -> Metrics:
    return {name: to_metric(value) for name, value in numbers.items()}


def to_metric(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)


def to_numbers(metrics: Metrics) -> dict[str, float]:
    """Raises ValueError for a text that is no number."""
    return {name: float(value) for name, value in metrics.items()}


class StateRef(msgspec.Struct, frozen=True, order=True):
    """A state: ``node``'s line trained up to ``step`` (exclusive of step ``step`` itself)."""

    node: NodeId
    step: int


class Span(msgspec.Struct, frozen=True):
    """Steps ``[start, stop)`` of a node, which lead to its states ``(start, stop]``."""

    node: NodeId
    start: int
    stop: int


class Kept(msgspec.Struct, frozen=True):
    """A state published in the checkpoint store. ``digest`` is that of its content (tensors and structure)."""

    key: StateKey
    bytes: int
    digest: str
    marks: str = ""
    """Of its leaves, to tell which of them differ when the state is trained again."""


class UserFailure(msgspec.Struct, frozen=True):
    """An exception in the user's code: its one-line summary, full traceback, and the names of its classes.

    ``kinds`` holds the qualified name of the exception's class and of its bases, so that ``catch`` can be honoured
    without sending the exception itself.
    """

    summary: str
    traceback: str
    kinds: tuple[str, ...] = ()


ChainOutcome = Literal["done", "stopped", "failed", "unreadable", "cut_off", "full", "lost"]
Departure = Literal["died", "closed", "unreachable"]
StateLoss = Literal["evicted", "unreadable"]


class PlanCreated(msgspec.Struct, frozen=True, tag=True):
    """First event of a journal: its format, the workload it belongs to, and what tells it from other plans of that.
    ``loaded``: digests of the workload's code by name, by which it is said what was edited."""

    format: int
    workload: StateKey
    described: dict[str, str]
    id: str = ""
    loaded: dict[str, str] = {}


class TrialAdded(msgspec.Struct, frozen=True, tag=True):
    trial: TrialId
    schedules: dict[str, Schedule]
    steps: int


class TargetAsked(msgspec.Struct, frozen=True, tag=True):
    """``driver`` wants ``trial`` trained to ``step`` and evaluated: by whom, is all the same."""

    trial: TrialId
    step: int
    driver: DriverId = DriverId("")


class StateReached(msgspec.Struct, frozen=True, tag=True):
    """A chain has trained steps ``[start, step)`` of ``node``; what is known and kept of the state at ``step``.

    ``train_seconds`` count from ``start``: the chain's previous boundary, or where its stage begins. ``source``, of the
    first state that a chain reaches: what it began with.
    """

    chain: ChainId
    worker: WorkerId
    node: NodeId
    start: int
    step: int
    at: float
    train_seconds: float
    load_seconds: float = 0.0
    evaluate_seconds: float = 0.0
    save_seconds: float = 0.0
    source: Literal["fresh", "continued", "live", "disk"] | None = None
    metrics: Metrics | None = None
    kept: Kept | None = None


class StateLost(msgspec.Struct, frozen=True, tag=True):
    """The checkpoint of a kept state is gone: evicted to make room, or found missing or damaged when it was loaded."""

    node: NodeId
    step: int
    reason: StateLoss
    message: str = ""


class StateDiffers(msgspec.Struct, frozen=True, tag=True):
    """A state that had been kept was trained again, and is another: some part of training is not exact.

    ``where``: the first leaf that differs, if it can be told; ``ways``: how each of the two came about, in words.
    """

    node: NodeId
    step: int
    worker: WorkerId
    at: float
    where: str | None
    ways: tuple[str, str]


class ForkVerified(msgspec.Struct, frozen=True, tag=True):
    """``steps`` steps after ``step``, the last of them of ``node``, were trained straight through and from the state at
    ``step``.

    ``difference``: what was not the same then, in words. As a report and in the journal alike.
    """

    chain: ChainId
    worker: WorkerId
    node: NodeId
    step: int
    steps: int
    seconds: float
    at: float
    difference: str | None = None


class StageFailed(msgspec.Struct, frozen=True, tag=True):
    """The user's code raised: in training at ``step``, or in evaluating the state at ``step``."""

    node: NodeId
    step: int
    evaluating: bool
    failure: UserFailure


class ChainLost(msgspec.Struct, frozen=True, tag=True):
    """Training of a chain's after its last boundary that was thrown away. ``outcome``: how the chain ended
    (:class:`ChainEnded`), or how its worker left (:class:`WorkerLeft`), with the ``message`` of either."""

    chain: ChainId
    worker: WorkerId
    node: NodeId
    step: int
    at: float
    outcome: ChainOutcome | Departure
    seconds: float
    steps: int
    message: str = ""

    @property
    def blames(self) -> bool:
        """May what was trained be to blame for it?"""
        return self.outcome in ("died", "lost")


class DriverJoined(msgspec.Struct, frozen=True, tag=True):
    """A driver works on the plan from now on. Workers of one ``pool`` with one id are one worker; ``checkpoints`` names
    the place where its states are kept; ``start`` tells its process from later ones with its id, such as the first
    process of a container that was started again."""

    driver: DriverId
    pool: str
    host: str
    pid: int
    at: float
    checkpoints: str = ""
    start: str = ""


class DriverLeft(msgspec.Struct, frozen=True, tag=True):
    """A driver is gone: its chains are over, and nobody waits for what it asked for."""

    driver: DriverId
    at: float
    reason: Literal["ended", "gone"]


class ChainStarted(msgspec.Struct, frozen=True, tag=True):
    """A driver's right to train these spans, until the chain is closed or the driver gone. It is written before
    the chain is started, on the condition that the driver knew all that was written before."""

    chain: ChainId
    driver: DriverId
    worker: WorkerId
    spans: tuple[Span, ...]
    at: float


class ChainProlonged(msgspec.Struct, frozen=True, tag=True):
    """The chain goes on with these spans."""

    chain: ChainId
    spans: tuple[Span, ...]


class ChainClosed(msgspec.Struct, frozen=True, tag=True):
    """The chain is over; what it did not reach is open again."""

    chain: ChainId
    at: float


class SearchStarted(msgspec.Struct, frozen=True, tag=True):
    """A call of ``optimize`` began to propose trials. ``study``: its name, or where another study of that name (not of
    that ``identity``) uses the plan, something longer. It is over at its :class:`SearchEnded`; until then a call that
    is the same in all of these continues it. One that ``extends`` takes over the trials of the study's last search.
    ``directions`` are the study's, "maximize" or "minimize": they tell those who read the plan what is good."""

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

    def same_call(self, other: SearchStarted) -> bool:
        return msgspec.structs.replace(self, at=other.at, directions=other.directions) == other


class RandomState(msgspec.Struct, frozen=True):
    """A NumPy ``RandomState``; ``key`` (base64) is left out where it is that of the state recorded before."""

    pos: int
    has_gauss: int
    gauss: float
    key: str | None


class ForkedFrom(msgspec.Struct, frozen=True):
    """A trial is ``donor`` up to ``step``, and the space's trial under ``params`` from there on. These are written as
    Python writes them: JSON has no infinities, and a NaN equals nothing."""

    donor: TrialId
    step: int
    params: dict[str, str]


class TrialProposed(msgspec.Struct, frozen=True, tag=True):
    """The study's trial ``number`` belongs to the search under way; ``sampler`` holds the sampler's random states
    after it was proposed (or, with ``number`` None, before the first).

    ``fork``: an algorithm made it out of another. ``extends``: it takes the place of a trial that was finished before
    it was carried on. ``params`` are the study's, for those who read the plan without it: what is no JSON scalar is
    written as Python writes it."""

    study: str
    number: int | None
    trial: TrialId | None
    sampler: dict[str, RandomState]
    fork: ForkedFrom | None = None
    extends: TrialId | None = None
    params: dict[str, bool | int | float | str | None] = {}


class TrialEnded(msgspec.Struct, frozen=True, tag=True):
    """The study has finished a trial: nothing more is asked of it. Nothing hangs on this but what is kept and shown.

    ``values``: the last that were told, one for each metric of the search, as in :data:`Metrics`; ``step``: the
    farthest that was asked of it."""

    study: str
    trial: TrialId
    state: Literal["COMPLETE", "PRUNED", "FAIL"]
    values: tuple[float | str, ...] | None
    step: int
    at: float


class SearchEnded(msgspec.Struct, frozen=True, tag=True):
    study: str
    at: float


Fact = (
    PlanCreated
    | TrialAdded
    | TargetAsked
    | StateReached
    | StateLost
    | StateDiffers
    | ForkVerified
    | StageFailed
    | ChainLost
    | DriverJoined
    | DriverLeft
    | ChainStarted
    | ChainProlonged
    | ChainClosed
    | SearchStarted
    | TrialProposed
    | TrialEnded
    | SearchEnded
)
