"""Facts about trials and their states: ``TrialAdded``, ``StateReached``, ``StageFailed``, ...; and ``PlanCreated``."""

from __future__ import annotations

from typing import Literal

import msgspec

from hpstage.plan.facts.values import (
    AuditOutcome,
    ChainId,
    DriverId,
    FrozenWork,
    Kept,
    Metrics,
    NodeId,
    Record,
    StateKey,
    StateLoss,
    TrialId,
    UserFailure,
    WorkerId,
    Workers,
)
from hpstage.schedule import Plateau, Schedule


class PlanCreated(Record, frozen=True, tag=True):
    """The first event of a journal: its format, its workload, and the ``id`` that distinguishes plans of the same
    workload. ``loaded``: digests of the workload's code by name, used to report which code was edited. ``origin``: the
    trainable as a command line names it (``search.py:Digits``, ``package.module:Digits``), in ``folder`` of the host
    that created the plan; empty if no name leads to it."""

    format: int
    workload: StateKey
    described: dict[str, str]
    id: str = ""
    loaded: dict[str, str] = msgspec.field(default_factory=dict)
    origin: str = ""
    folder: str = ""


class TrialAdded(Record, frozen=True, tag=True, omit_defaults=True):
    """A trial of ``steps`` steps. ``keep_at``: steps after which its states are saved if it is trained past them, since
    trials that are not known yet will be forked there.

    The schedules of the hyperparameters in ``plateaus`` depend on metrics: ``schedules`` holds them as decided so far,
    and each decision adds the trial again."""

    trial: TrialId
    schedules: dict[str, Schedule]
    steps: int
    keep_at: tuple[int, ...] = ()
    plateaus: dict[str, Plateau] = msgspec.field(default_factory=dict)


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
    was done; the fact may be written later. ``peak_bytes``: the peak memory allocated on CUDA devices while these steps
    were trained; not set without steps or CUDA devices.

    All seconds are worker seconds: W times the elapsed time if a gang of W workers trained the steps; the chain's share
    of it if a worker trained k chains side by side. ``workers``: the number of workers that the chain had while it
    trained, W or 1/k. ``alone_seconds``: the estimated ``train_seconds`` of one worker that trains nothing else; not
    set if they are the same. ``frozen``: the work of frozen layers in these steps.
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
        """Seconds of training that were saved because the worker trained several chains side by side."""
        return self.own_seconds - self.train_seconds if self.workers <= 1 else 0.0

    @property
    def exchange_seconds(self) -> float:
        """Additional seconds of training because several workers trained the chain together."""
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

    ``where``: the first leaf that differs, if it can be determined; ``ways``: how each of the two results was produced,
    in words.
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

    ``difference``: what differed between the two, in words; ``remark``: anything else that the user should know about
    these steps. Used both as a report and in the journal.
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
    """An audit trained again, in a fresh process, from the state at ``start`` (0: from scratch) to the state at
    ``step`` of ``node``.

    ``of``: a "segment" between two checkpoints; a whole "trial", alone and with nothing captured; or the "winner"
    before a search returned. ``outcome``: "equal" if all states ``compared`` were; "differs" (a :class:`StateDiffers`
    follows); "stopped" if it gave way to training; "failed" if it could not be trained again, for the reason in
    ``message``. ``seconds``: the time of its worker, which is charged to no trial. ``waited``: seconds for which
    workers waited for the audit after the last stage of the search; the rest was idle time.
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
    """Training at ``step``, or evaluating the state at ``step``, has failed: the user's code raised, or several workers
    in a row died (:mod:`hpstage.scheduler.lost_workers`)."""

    node: NodeId
    step: int
    evaluating: bool
    failure: UserFailure


class TrainingEnded(Record, frozen=True, tag=True):
    """The user's code ended training on ``node`` in step ``step``: every trial with this step ends with the state at
    :attr:`last`, even if more steps are requested, now or later.

    ``outcome``: "complete" (the step was trained, and the state after it has metrics) or "pruned" (it was not trained).
    ``diverged``: it was pruned because its loss is not finite. Used both as a report and in the journal.
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
        """The number of steps after which its trials end."""
        return self.step + (self.outcome == "complete")


class StepsTimed(Record, frozen=True, tag=True):
    """How long a worker's step takes when it trains several chains side by side. ``seconds``: pairs of the number of
    chains and the time of the step, as for :class:`hpstage.plan.step_times.StepTimes`. For each number of chains, the
    first such fact in a plan counts."""

    seconds: tuple[tuple[int, float], ...]
    at: float
