"""Messages: chains for workers, workers' reports, and the scheduler's instructions.

Frozen structs, like facts (:mod:`hpstage.plan.facts`).
"""

from __future__ import annotations

from typing import Literal, NewType

import msgspec

from hpstage.plan.facts import (
    AuditOutcome,
    ChainId,
    ChainOutcome,
    Departure,
    ForkVerified,
    InputsRead,
    Metrics,
    NodeId,
    StateKey,
    StateReached,
    StateRef,
    TrainingEnded,
    UserFailure,
    WorkerId,
)
from hpstage.schedule import Form, Scalar

AuditId = NewType("AuditId", str)
Verify = Literal["first-fork", "all", "off"]
"""Which forks are verified: the first of a workload under each regime, additionally one per chain, or none."""

Auditing = Literal["idle", "winner", "off"]
"""What is audited: segments and whole trials on idle workers, the best trial before the call returns, or nothing."""


class Stage(msgspec.Struct, frozen=True):
    """Steps ``[start, stop)`` of one node; ``forms`` gives every hyperparameter's value at each step, names sorted.

    ``history`` is the digest of all values that the branch has seen up to and including those at ``start``
    (:class:`hpstage.plan.keys.ValueHistory`), from which the worker computes the key of each state on the stage.
    """

    node: NodeId
    start: int
    stop: int
    forms: dict[str, Form]
    history: bytes
    verify: bool = False
    """Whether to verify a fork at the start of the stage: see :mod:`hpstage.execution.verification`."""


class Boundary(msgspec.Struct, frozen=True):
    """Actions once the branch is trained up to ``step``: evaluate it, keep its state under ``key``."""

    node: NodeId
    step: int
    key: StateKey
    evaluate: bool
    keep: bool


class Chain(msgspec.Struct, frozen=True):
    """Consecutive stages for one worker.

    ``source`` is the saved state to fork (``None``: start fresh). ``initial`` holds the values at step 0, from
    which the trainable is set up. ``boundaries`` are in the order in which the chain reaches them; a boundary at
    the source itself (a saved state that is only evaluated) comes first. The ``parent`` in the manifest of each
    checkpoint is the previous boundary or the source. The chain ends at its last boundary, or earlier at
    the boundary ``end``; it holds the stages beyond ``end`` in case ``end`` is moved while it runs.

    A chain also keeps its state between boundaries on its own, since no message could reach it at the right step:
    ``keep_every``: at each multiple of this many steps, counted from the start of training; ``keep_seconds``: at most
    this many seconds after it last kept one. ``time_first``: it reports its first step, to measure a step's duration.

    ``gang``: further workers that train each step together with the chain's own worker, which alone evaluates, saves
    states and reports.
    """

    id: ChainId
    source: StateKey | None
    initial: dict[str, Scalar]
    stages: tuple[Stage, ...]
    boundaries: tuple[Boundary, ...]
    end: StateRef | None = None
    keep_every: int | None = None
    keep_seconds: float | None = None
    time_first: bool = False
    verify_new: bool = False
    """Whether to verify a fork wherever training begins to change something that it had not changed before."""
    numerics: str = ""
    """The step backend, where the trainable leaves the choice to the search."""
    gang: tuple[WorkerId, ...] = ()
    step_times: tuple[tuple[int, float], ...] = ()
    """Seconds of a step by the number of concurrent chains (:mod:`hpstage.plan.step_times`); empty if not known."""

    @property
    def last(self) -> StateRef:
        """The state at which the chain ends, unless it is amended."""
        return self.end or StateRef(self.boundaries[-1].node, self.boundaries[-1].step)


class Amendment(msgspec.Struct, frozen=True):
    """A change to a running chain: further stages, boundaries ahead (replacing those at the same state), and
    its new end (``None``: its last boundary)."""

    chain: ChainId
    stages: tuple[Stage, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    end: StateRef | None = None


def names_of(worker: WorkerId, slots: int) -> list[WorkerId]:
    """Return the names of a worker's slots; the first is its own."""
    return [worker, *(WorkerId(f"{worker}#{slot}") for slot in range(1, slots))]


def host_of(slot: WorkerId) -> WorkerId:
    """Return the worker that a slot belongs to."""
    return WorkerId(slot.partition("#")[0])


class Noticed(msgspec.Struct, frozen=True):
    """A message for the user about something that a worker has noticed in training.

    If ``ends_at`` is set, ``text`` names the setting that ends training after that number of steps, for trials of
    another length; ``sizes``: whether the user's code computes a schedule from it.
    """

    text: str
    ends_at: int | None = None
    sizes: bool = False


class BoundaryReached(msgspec.Struct, frozen=True, tag=True):
    """A running chain has reached a boundary, planned or its own, and performed its actions.

    ``reached`` is the fact for the journal. The end of each stage is always reported. ``failure``:
    ``evaluate()`` failed here; training continues. ``ending``: set if the user's code has ended training with this
    state; both facts are written at once, since nothing may be trained from the state in between.
    """

    reached: StateReached
    failure: UserFailure | None = None
    ending: TrainingEnded | None = None
    noticed: tuple[Noticed, ...] = ()

    @property
    def chain(self) -> ChainId:
        return self.reached.chain


class BoundaryMissed(msgspec.Struct, frozen=True, tag=True):
    """An amendment came too late: the chain had already passed ``step`` of ``node`` and is at ``position``."""

    chain: ChainId
    worker: WorkerId
    node: NodeId
    step: int
    position: int


class StepsMeasured(msgspec.Struct, frozen=True, tag=True):
    """A worker has measured how long a step takes that trains several of its chains, ``chain`` among them, side by
    side. ``seconds``: pairs of the number of chains and the time of the step, for all numbers measured so far."""

    chain: ChainId
    worker: WorkerId
    seconds: tuple[tuple[int, float], ...]
    at: float


class ChainEnded(msgspec.Struct, frozen=True, tag=True):
    """A chain has ended; the worker is free, or gone.

    ``done``: trained to its end. ``stopped``: on request. ``failed``: the user's training code raised at ``step`` of
    ``node``. ``unreadable``: the source could not be loaded (missing or corrupt). ``cut_off``: the worker cannot access
    the checkpoint location, which says nothing about the checkpoints in it. ``full``: there was no room for a
    checkpoint. ``apart``: the workers of its gang did not meet, and nothing was trained. ``lost``: the worker, another
    of its gang, or its task vanished. ``wasted_seconds`` (of all its workers) and ``wasted_steps`` count training after
    the last boundary that is not reported elsewhere.
    """

    chain: ChainId
    worker: WorkerId
    outcome: ChainOutcome
    at: float
    node: NodeId | None = None
    step: int | None = None
    failure: UserFailure | None = None
    message: str = ""
    wasted_seconds: float = 0.0
    wasted_steps: int = 0


class WorkerJoined(msgspec.Struct, frozen=True, tag=True):
    """A worker is ready for a chain, or one slot of a worker that trains several chains side by side."""

    worker: WorkerId
    at: float


class WorkerLeft(msgspec.Struct, frozen=True, tag=True):
    """The worker is gone, and any chain running on it is lost.

    ``died``: its process ended or stopped responding, possibly because of the chain. ``closed``: it was retired, scaled
    down, restarted or stopped on request. ``unreachable``: it was lost together with the scheduler. ``message``: how
    its process ended, if known.
    """

    worker: WorkerId
    at: float
    reason: Departure = "died"
    message: str = ""


class Compared(msgspec.Struct, frozen=True):
    """A state with which a segment is compared on its way: that after ``step`` steps, saved under ``key``.

    ``marks``: those of its leaves, if known (:func:`~hpstage.checkpoints.state_tree.marks_of`). ``texts``: descriptions
    of its leaves by path, instead of marks; with these, the state need not have been saved. ``reported``: whether a
    report was requested after that step, which is so for every saved state.
    """

    step: int
    key: StateKey
    digest: str
    marks: str = ""
    texts: dict[str, str] = {}
    reported: bool = True


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """The steps to train again: a part of one path, or all of it.

    Attributes:
        initial: the values at step 0, from which the trainable is set up.
        stages: consecutive; their forms give the values at each step.
        stop: number of steps after which it ends.
        source: the saved state to begin with, at the start of the first stage; ``None``: train from scratch.
        compared: saved states on the way, with which the retrained states are compared.
        metrics: known metrics by step, compared in the same way.
        reported: further steps after which to report as before, since evaluating may change objects that no step reads.
        measured: ``False`` compares only what training may depend on, and no local variables or metrics in states:
            training must be the same without these reports.
        numerics: the step backend, where the trainable leaves the choice to the search.
        captured: ``False`` trains without capture, as an ordinary training loop does. Then only the tensors of models
            are compared in a state, and only the metrics after the last step.
    """

    initial: dict[str, Scalar]
    stages: tuple[Stage, ...]
    stop: int
    source: StateKey | None = None
    compared: tuple[Compared, ...] = ()
    metrics: dict[int, Metrics] = {}
    reported: tuple[int, ...] = ()
    numerics: str = ""
    captured: bool = True
    measured: bool = True

    @property
    def start(self) -> int:
        return self.stages[0].start

    def values(self, step: int) -> dict[str, Scalar]:
        """Return the value of every hyperparameter at a step."""
        stage = next(stage for stage in self.stages if step < stage.stop)
        return {name: form.value(step) for name, form in stage.forms.items()}


class Audit(msgspec.Struct, frozen=True):
    """A segment to be trained again in a fresh process. If it is not ``captured``, it is a whole trial, trained
    by itself without capturing or restoring any state."""

    id: AuditId
    segment: Segment


class AuditEnded(msgspec.Struct, frozen=True, tag=True):
    """An audit has ended, by itself or because its worker was needed.

    ``compared``: how many states were compared. ``step`` and ``where`` locate the first difference: after which step it
    was found, and in which leaf of the state or which metric.
    """

    audit: AuditId
    worker: WorkerId
    at: float
    outcome: AuditOutcome
    seconds: float
    compared: int = 0
    step: int | None = None
    where: str | None = None
    message: str = ""


ChainReport = BoundaryReached | BoundaryMissed | ForkVerified | InputsRead | StepsMeasured | TrainingEnded | ChainEnded
"""A worker's reports about a chain; the last one is its ``ChainEnded``."""
Report = ChainReport | AuditEnded | WorkerJoined | WorkerLeft


class StartChain(msgspec.Struct, frozen=True):
    worker: WorkerId
    chain: Chain


class AmendChain(msgspec.Struct, frozen=True):
    amendment: Amendment


class StopChain(msgspec.Struct, frozen=True):
    """End the chain at its next step; with ``keep`` its state there is kept, so nothing is lost."""

    chain: ChainId
    keep: bool


class ExpectStates(msgspec.Struct, frozen=True):
    """A hint: chains on the worker are expected to start from these checkpoints next, soonest first. It replaces the
    worker's earlier one."""

    worker: WorkerId
    keys: tuple[StateKey, ...]


class StartAudit(msgspec.Struct, frozen=True):
    """Run an audit on a worker that trains nothing."""

    worker: WorkerId
    audit: Audit


class StopAudit(msgspec.Struct, frozen=True):
    """End an audit at once."""

    audit: AuditId


Instruction = StartChain | AmendChain | StopChain | ExpectStates | StartAudit | StopAudit
