"""Messages: what a worker is asked to do, what it reports, and what the scheduler wants done.

Frozen structs as facts are (:mod:`hpstage.plan.facts`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from hpstage.plan.facts import (
    ChainId,
    ChainOutcome,
    Departure,
    ForkVerified,
    NodeId,
    StateKey,
    StateReached,
    StateRef,
    UserFailure,
    WorkerId,
)
from hpstage.schedule import Form, Scalar

Verify = Literal["first-fork", "all", "off"]
"""Which forks are verified: the first of a workload under each kind of values, one of each chain besides, or none."""


class Stage(msgspec.Struct, frozen=True):
    """Steps ``[start, stop)`` of one node; ``forms`` give every hyper-parameter's value at each step, names sorted.

    ``history`` is the digest of all values that the line has seen up to and including those at ``start``
    (:class:`hpstage.plan.keys.History`): with it, whoever trains the stage can name each state on it.
    """

    node: NodeId
    start: int
    stop: int
    forms: dict[str, Form]
    history: bytes
    verify: bool = False
    """Whether a fork is verified where the stage begins: see :mod:`hpstage.execution.verification`."""


class Boundary(msgspec.Struct, frozen=True):
    """What to do when the line has been trained up to ``step``: evaluate it, keep its state under ``key``."""

    node: NodeId
    step: int
    key: StateKey
    evaluate: bool
    keep: bool


class Chain(msgspec.Struct, frozen=True):
    """Consecutive stages for one worker.

    ``source`` is the kept state to fork (``None``: start fresh). ``initial`` holds the values at step 0, from
    which the trainable is set up. ``boundaries`` are in the order in which the line passes them; a boundary at
    the source itself (a kept state that is only to be evaluated) comes first. ``parent`` of each kept state in
    its manifest is the previous boundary or source on the line. The chain is over at its last boundary, or sooner at
    the boundary ``end``: it knows the way on from there, in case ``end`` is moved while it runs.

    Besides at its boundaries a chain keeps its state by itself, since no word could reach it at the right step:
    ``keep_every``: at each multiple of so many steps, counted from the beginning of training; ``keep_seconds``: so many
    seconds after it last kept one, at the latest. ``time_first``: it reports its first step, for what a step takes.
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
    """Whether one is verified wherever training has begun to change what it had not changed before."""


class Amendment(msgspec.Struct, frozen=True):
    """A change to a running chain: stages to go on with, boundaries ahead (replacing those at the same state), and
    where it is to end now (``None``: at its last boundary)."""

    chain: ChainId
    stages: tuple[Stage, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    end: StateRef | None = None


class BoundaryReached(msgspec.Struct, frozen=True, tag=True):
    """A running chain stands at a boundary, set for it or by itself, and has done what the boundary asked.

    ``reached`` is what the journal will hold of it. The end of each stage is always reported. ``failure``:
    ``evaluate()`` failed here; training goes on.
    """

    reached: StateReached
    failure: UserFailure | None = None


class BoundaryMissed(msgspec.Struct, frozen=True, tag=True):
    """An amendment came too late: the chain had already passed ``step`` of ``node`` and stands at ``position``."""

    chain: ChainId
    worker: WorkerId
    node: NodeId
    step: int
    position: int


class ChainEnded(msgspec.Struct, frozen=True, tag=True):
    """A chain is over; the worker is free, or gone.

    ``done``: trained to its end. ``stopped``: told to. ``failed``: the user's training code raised at ``step`` of
    ``node``. ``unreadable``: the source could not be loaded (missing or corrupt). ``cut_off``: the worker cannot use
    the place of the checkpoints, which tells nothing of what is kept there. ``full``: there was no room for a
    checkpoint. ``lost``: the worker or its task vanished. ``wasted_seconds`` and ``wasted_steps`` count training after
    the last boundary that is reported nowhere else.
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
    worker: WorkerId
    at: float


class WorkerLeft(msgspec.Struct, frozen=True, tag=True):
    """The worker is gone; a chain that ran on it is lost.

    ``died``: its process ended or fell silent, for which the chain may be to blame. ``closed``: it was retired, scaled
    down, restarted or told to end. ``unreachable``: it was lost together with the scheduler. ``message``: how its
    process ended, if that is known.
    """

    worker: WorkerId
    at: float
    reason: Departure = "died"
    message: str = ""


Report = BoundaryReached | BoundaryMissed | ForkVerified | ChainEnded | WorkerJoined | WorkerLeft


class StartChain(msgspec.Struct, frozen=True):
    worker: WorkerId
    chain: Chain


class AmendChain(msgspec.Struct, frozen=True):
    amendment: Amendment


class StopChain(msgspec.Struct, frozen=True):
    """The chain is to end at its next step; with ``keep`` its state there is kept, and nothing is lost."""

    chain: ChainId
    keep: bool


Instruction = StartChain | AmendChain | StopChain
