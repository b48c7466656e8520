"""Facts, the events of a search that the journal records, and the values that they contain.

All are frozen ``msgspec`` structs: tagged, validated on decoding, and stored as JSON, never pickled.
Seconds are wall-clock durations; ``at`` is a time on the executor's clock (seconds since the epoch, or virtual).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, NewType

import msgspec

from hpstage.schedule import Plateau, Scalar, Schedule

NodeId = NewType("NodeId", int)
"""Position of a node in the plan, in order of creation. Identical in every fold of the same journal."""
TrialId = NewType("TrialId", str)
"""Identifies a trial within a plan: ``"<study name>/<number>"``."""
WorkerId = NewType("WorkerId", str)
DriverId = NewType("DriverId", str)
"""Identifies a driver: one process's participation in a plan, until it leaves or its lease expires."""
ChainId = NewType("ChainId", str)
StateKey = NewType("StateKey", str)
"""Permanent identifier of a state: 32 hex digits (see ``keys.py``)."""
Workers = Annotated[float, msgspec.Meta(gt=0)]
Metric = float | Annotated[str, msgspec.Meta(pattern="^(nan|-?inf)$")]
Metrics = dict[str, Metric]
"""Serialized metrics. JSON has no NaN or infinities, so these are strings (``"nan"``, ``"inf"``, ``"-inf"``)."""


def to_metrics(numbers: Mapping[str, float]) -> Metrics:
    return {name: to_metric(value) for name, value in numbers.items()}


def to_metric(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)


def to_numbers(metrics: Metrics) -> dict[str, float]:
    """Raise ValueError for a string that is not a number."""
    return {name: float(value) for name, value in metrics.items()}


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a journal's record. A field that this version does not know may change what the others mean."""


class StateRef(Record, frozen=True, order=True):
    """A state: ``node``'s branch trained up to, but not including, step ``step``."""

    node: NodeId
    step: int


class Span(Record, frozen=True):
    """Steps ``[start, stop)`` of a node, which produce its states ``(start, stop]``."""

    node: NodeId
    start: int
    stop: int


class Part(Record, frozen=True):
    """Leaves that several states have in common, stored once: its key in the checkpoint store, and its bytes."""

    key: StateKey
    bytes: int


class Kept(Record, frozen=True, omit_defaults=True):
    """A state published in the checkpoint store. ``digest`` covers its content (tensors and structure)."""

    key: StateKey
    bytes: int
    """Bytes that it has, wherever they are stored: the same in every run."""
    digest: str
    marks: str = ""
    """Marks of its leaves, to identify those that differ when the state is retrained."""
    parts: tuple[Part, ...] = ()
    """Parts that hold leaves of it which other states have as well."""
    rest: int | None = None
    """Bytes of its own files, where it has parts."""

    @property
    def own(self) -> int:
        """Bytes of its own files."""
        return self.bytes if self.rest is None else self.rest


class UserFailure(Record, frozen=True):
    """An exception in the user's code: its one-line summary, full traceback and class names.

    ``kinds`` holds the qualified names of the exception's class and its bases, so that ``catch`` can be honoured
    without sending the exception itself.
    """

    summary: str
    traceback: str
    kinds: tuple[str, ...] = ()


class FrozenWork(Record, frozen=True):
    """Batches to which frozen layers were to be applied before anything that is trained, and the ``skipped`` ones among
    them, for which a sibling or an earlier step had computed the same. ``seconds``: what they saved, an estimate."""

    batches: int
    skipped: int
    seconds: float

    def __add__(self, other: FrozenWork) -> FrozenWork:
        return FrozenWork(self.batches + other.batches, self.skipped + other.skipped, self.seconds + other.seconds)


NO_FROZEN_WORK = FrozenWork(0, 0, 0.0)
ChainOutcome = Literal["done", "stopped", "failed", "unreadable", "cut_off", "full", "apart", "lost"]
Departure = Literal["died", "closed", "unreachable"]
StateLoss = Literal["evicted", "unreadable"]
AuditOutcome = Literal["equal", "differs", "stopped", "failed"]


class PlanCreated(Record, frozen=True, tag=True):
    """The first event of a journal: its format, its workload, and the ``id`` that distinguishes plans of the same
    workload. ``loaded``: digests of the workload's code by name, used to report which code was edited. ``origin``: the
    trainable as a command line names it (``search.py:Digits``, ``package.module:Digits``), in ``folder`` of the host
    that created the plan; empty if no name leads to it."""

    format: int
    workload: StateKey
    described: dict[str, str]
    id: str = ""
    loaded: dict[str, str] = {}
    origin: str = ""
    folder: str = ""


class TrialAdded(Record, frozen=True, tag=True, omit_defaults=True):
    """A trial of ``steps`` steps. After the steps ``keep_at``, states are kept on its way if it is trained past them:
    trials are to be forked there that are not known yet.

    Schedules of the hyperparameters ``plateaus`` are decided by metrics: ``schedules`` has them as decided so far, and
    each decision adds the trial again."""

    trial: TrialId
    schedules: dict[str, Schedule]
    steps: int
    keep_at: tuple[int, ...] = ()
    plateaus: dict[str, Plateau] = {}


class TargetAsked(Record, frozen=True, tag=True):
    """``driver`` requests ``trial`` to be trained to ``step`` and evaluated, by any driver."""

    trial: TrialId
    step: int
    driver: DriverId = DriverId("")


class StateReached(Record, frozen=True, tag=True, omit_defaults=True):
    """A chain has trained steps ``[start, step)`` of ``node``: the metrics and checkpoint of the state at ``step``.

    ``train_seconds`` counts from ``start``: the chain's previous boundary, or the start of its stage. ``source``, set
    for the first state that a chain reaches, is what the chain started from. ``save_seconds``: for how long training
    paused to save states, not how long it took to write them in the background: the seconds of a worker's facts never
    overlap. They include the wait, at the end of a chain, until its last state was durable. ``at``: when all of this
    was done; the fact may come later. ``peak_bytes``: the most memory of CUDA devices that was allocated while these
    steps were trained, if they were and there are any.

    All seconds are those of workers: if a gang of W workers has trained the steps, W times the time that has passed; if
    a worker trained k chains side by side, the chain's share of it. ``workers`` is how many workers the chain had
    while it trained, W or 1/k. ``alone_seconds``: the estimated ``train_seconds`` of one worker that trains nothing
    else; not set if they are the same. ``frozen``: in these steps.
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
    peak_bytes: int | None = None
    workers: Workers = 1.0
    alone_seconds: float | None = None
    frozen: FrozenWork | None = None

    @property
    def own_seconds(self) -> float:
        """Seconds of training on one worker that trains nothing else."""
        return self.train_seconds if self.alone_seconds is None else self.alone_seconds

    @property
    def fused_seconds(self) -> float:
        """Seconds of training that were saved because the worker trained others side by side."""
        return self.own_seconds - self.train_seconds if self.workers <= 1 else 0.0

    @property
    def exchange_seconds(self) -> float:
        """Further seconds of training because several workers trained it together."""
        return self.train_seconds - self.own_seconds if self.workers > 1 else 0.0

    @property
    def began(self) -> float:
        """When the chain started to train towards this state."""
        if self.workers == 1.0:
            return self.at - self.save_seconds - self.evaluate_seconds - self.train_seconds - self.load_seconds
        share = max(1.0, self.workers)  # in a bundle, others wait while it loads, evaluates or saves
        at = self.at - self.save_seconds / share - self.evaluate_seconds / share
        return at - self.train_seconds / self.workers - self.load_seconds / share


class StateLost(Record, frozen=True, tag=True):
    """The checkpoint of a state is gone: evicted to make room, or found missing or damaged on loading."""

    node: NodeId
    step: int
    reason: StateLoss
    message: str = ""


class StateDiffers(Record, frozen=True, tag=True):
    """A saved state was trained again with a different result: some part of training is not exact.

    ``where``: the first leaf that differs, if it can be determined; ``ways``: how each of the two was produced, in
    words.
    """

    node: NodeId
    step: int
    worker: WorkerId
    at: float
    where: str | None
    ways: tuple[str, str]


class ForkVerified(Record, frozen=True, tag=True):
    """The ``steps`` steps after ``step``, the last of them on ``node``, were trained both straight through and from the
    state at ``step``.

    ``difference``: what differed between the two, in words; ``remark``: what the user should know of these steps
    besides. Used both as a report and in the journal.
    """

    chain: ChainId
    worker: WorkerId
    node: NodeId
    step: int
    steps: int
    seconds: float
    at: float
    difference: str | None = None
    remark: str = ""


class Audited(Record, frozen=True, tag=True, omit_defaults=True):
    """An audit trained again, in a fresh process, from the state at ``start`` (0: from nothing) to the state at
    ``step`` of ``node``.

    ``of``: a "segment" between two checkpoints; a whole "trial", alone and with nothing captured; or the "winner"
    before a search returned. ``outcome``: "equal" if all states ``compared`` were; "differs" (a :class:`StateDiffers`
    follows); "stopped" if it gave way to training; "failed" if it could not be trained again, for the reason in
    ``message``. ``seconds`` are those of its worker, and the work of no trial. ``waited``: seconds for which workers
    waited for it after the last stage of the search: the rest was idle time.
    """

    of: Literal["segment", "trial", "winner"]
    worker: WorkerId
    node: NodeId
    start: int
    step: int
    at: float
    seconds: float
    outcome: AuditOutcome
    compared: int = 0
    waited: float = 0.0
    message: str = ""


class InputsRead(Record, frozen=True, tag=True):
    """Training has read files, folders or environment variables that are not part of the workload's key.

    ``inputs``: digests of their contents by name (see :mod:`hpstage.training.identity.inputs`). Used both as a report
    and in the journal.
    """

    chain: ChainId
    worker: WorkerId
    at: float
    inputs: dict[str, str]


class StageFailed(Record, frozen=True, tag=True):
    """The user's code raised while training at ``step`` or while evaluating the state at ``step``."""

    node: NodeId
    step: int
    evaluating: bool
    failure: UserFailure


class TrainingEnded(Record, frozen=True, tag=True):
    """The user's code ended training on ``node`` in step ``step``: every trial that has this step ends with the state
    at :attr:`last`, whatever steps are requested of it, now or later.

    ``outcome``: "complete" (the step was trained, and the state after it has metrics) or "pruned" (it was not trained).
    ``diverged``: it was pruned for its loss, which is not finite. Used both as a report and in the journal.
    """

    chain: ChainId
    worker: WorkerId
    node: NodeId
    step: int
    at: float
    outcome: Literal["complete", "pruned"]
    message: str = ""
    diverged: bool = False

    @property
    def last(self) -> int:
        """The number of steps that its trials have."""
        return self.step + (self.outcome == "complete")


class ChainLost(Record, frozen=True, tag=True):
    """Training after a chain's last boundary was discarded. ``outcome`` and ``message``: how the chain ended
    (:class:`ChainEnded`) or how its worker left (:class:`WorkerLeft`). ``seconds`` are those of all its ``workers``."""

    chain: ChainId
    worker: WorkerId
    node: NodeId
    step: int
    at: float
    outcome: ChainOutcome | Departure
    seconds: float
    steps: int
    message: str = ""
    workers: Workers = 1.0

    @property
    def began(self) -> float:
        """When the discarded training began."""
        return self.at - self.seconds / self.workers

    @property
    def blames(self) -> bool:
        """Whether the training itself may have caused the loss."""
        return self.outcome in ("died", "lost")


class DriverJoined(Record, frozen=True, tag=True):
    """A driver starts working on the plan. Workers with the same ``pool`` and id are the same worker; ``checkpoints``
    is the location of its checkpoints; ``start`` distinguishes its process from later ones with the same id, such as
    the first process of a restarted container; ``version`` is its hpstage's."""

    driver: DriverId
    pool: str
    host: str
    pid: int
    at: float
    checkpoints: str = ""
    start: str = ""
    version: str = ""


class DriverLeft(Record, frozen=True, tag=True):
    """A driver is gone: its chains have ended, and its targets are no longer waited for."""

    driver: DriverId
    at: float
    reason: Literal["ended", "gone"]


class WorkersChanged(Record, frozen=True, tag=True, omit_defaults=True):
    """Workers of ``pool`` have joined or left a driver. From join to leave they are allocated, idle or not."""

    driver: DriverId
    at: float
    pool: str = ""
    joined: tuple[WorkerId, ...] = ()
    left: tuple[WorkerId, ...] = ()


class ChainStarted(Record, frozen=True, tag=True, omit_defaults=True):
    """A driver's right to train these spans until the chain is closed or the driver is gone. It is written before
    the chain is started, on the condition that the driver has read all earlier records. ``gang``: further workers that
    train its steps together with ``worker``, which leads them."""

    chain: ChainId
    driver: DriverId
    worker: WorkerId
    spans: tuple[Span, ...]
    at: float
    gang: tuple[WorkerId, ...] = ()


class ChainProlonged(Record, frozen=True, tag=True):
    """The chain continues with these spans."""

    chain: ChainId
    spans: tuple[Span, ...]


class ChainClosed(Record, frozen=True, tag=True):
    """The chain has ended; the steps it did not reach may be trained by another."""

    chain: ChainId
    at: float


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
    defaults: dict[str, Scalar] = {}
    workers: int = 1
    continues: bool = False
    given: int | None = None

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
    params: dict[str, bool | int | float | str | None] = {}
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


class SearchEnded(Record, frozen=True, tag=True):
    study: str
    at: float


class StepsTimed(Record, frozen=True, tag=True):
    """How long a step of several chains side by side takes a worker: pairs of their number and seconds, as for
    :class:`hpstage.plan.step_times.StepTimes`. Of each number, the first fact of a plan that has it counts."""

    seconds: tuple[tuple[int, float], ...]
    at: float


Fact = (
    PlanCreated
    | TrialAdded
    | TargetAsked
    | StateReached
    | StateLost
    | StateDiffers
    | ForkVerified
    | Audited
    | InputsRead
    | StageFailed
    | TrainingEnded
    | ChainLost
    | DriverJoined
    | DriverLeft
    | WorkersChanged
    | ChainStarted
    | ChainProlonged
    | ChainClosed
    | SearchStarted
    | TrialProposed
    | TrialEnded
    | SearchEnded
    | StepsTimed
)
