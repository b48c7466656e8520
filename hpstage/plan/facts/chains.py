"""Facts about drivers, workers and chains, such as ``DriverJoined``, ``ChainStarted`` and ``ChainLost``."""

from __future__ import annotations

from typing import Literal

from hpstage.plan.facts.values import (
    ChainId,
    ChainOutcome,
    Departure,
    DriverId,
    NodeId,
    Record,
    Span,
    WorkerId,
    Workers,
)


class DriverJoined(Record, frozen=True, tag=True):
    """A driver starts working on the plan. Workers with the same ``pool`` and id are the same worker; ``checkpoints``
    is the location of its checkpoints; ``start`` distinguishes its process from later ones with the same id, such as
    the first process of a restarted container; ``version`` is that of its hpstage."""

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
    """The chain has ended; another chain may train the steps that it did not reach."""

    chain: ChainId
    at: float


class ChainLost(Record, frozen=True, tag=True):
    """Training after a chain's last reported boundary is discarded, since the chain ended between two
    boundaries (:class:`ChainEnded`) or its worker left (:class:`WorkerLeft`); ``outcome`` and ``message`` are theirs.

    ``node`` and ``step``: where the chain ended; after a worker's death, its last checkpoint, where training begins
    again. ``steps``: the number of discarded steps, 0 after a death. ``seconds``: the sum over all ``workers``.
    """

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
