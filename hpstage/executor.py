"""Executor port: trains chains on workers and reports; it decides nothing."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import msgspec

from hpstage.plan.facts import ChainId, WorkerId
from hpstage.plan.messages import Amendment, Chain, Report
from hpstage.schedule import Scalar

if TYPE_CHECKING:
    from hpstage.checkpoints import CheckpointStore
    from hpstage.store import Journal


class Environment(msgspec.Struct, frozen=True):
    """What a worker is and what it would train: ``described`` and ``identity`` go into the workload's key.

    Attributes:
        described: short names to texts, e.g. ``{"torch": "2.13.0", "device": "cpu", "isa": "AVX512", "threads": "1",
            "numerics": "eager-v1", "data": "1797 x 0f3a..."}``.
        identity: of the trainable's code and attributes, as they are loaded there (see
            :mod:`hpstage.training.identity.workload`). Empty where nothing is loaded: the driver's own is taken.
        loaded: what each function and module is there, and versions of packages, to find out what differs.
        remarks: lines for people, logged once by the driver.
        warnings: the same, of what they had better change.
    """

    described: dict[str, str]
    identity: dict[str, str] = {}
    loaded: dict[str, str] = {}
    remarks: list[str] = []
    warnings: list[str] = []


class Executor(ABC):
    """Trains chains on workers.

    Obligations. ``open`` is called once, first; it sends the trainable to the workers, sets it up far enough to
    describe the environment, and fails with a clear error before anything is trained: :class:`UsageError` for a
    trainable that cannot be sent, :class:`ClusterError` for a cluster without workers or devices, or whose workers
    differ in environment. ``start`` hands one chain to one idle worker and returns at once. At most one chain per
    worker is in flight. Every started chain ends in exactly one ``ChainEnded`` (a chain on a worker that left, in
    ``WorkerLeft`` alone). Reports of one chain come in order. ``amend`` and ``stop`` are best effort: they may
    come too late, and the reports tell. Only the driver's thread calls these methods.
    """

    worker_timeout: float = 60.0
    """Seconds without any worker, with work to do, after which the driver gives up."""

    @abstractmethod
    def open(self, trainable: object, checkpoints: CheckpointStore | None) -> Environment:
        """Prepare the workers and return the environment that they share.

        ``checkpoints`` may be ``None`` here: the store may depend on the environment's key. It must then be
        given with :meth:`use` before the first ``start``.
        """

    @property
    def pool(self) -> str:
        """Names the workers' cluster, after ``open``: workers of equal pool and id are one worker for all drivers.

        It may be another one when workers join after all had left.
        """
        return f"{socket.gethostname()}/{os.getpid()}/{id(self):x}"

    @abstractmethod
    def use(self, checkpoints: CheckpointStore) -> None:
        """Tell the workers where checkpoints are kept. Called once, before the first ``start``."""

    @abstractmethod
    def try_out(self, initial: Mapping[str, Scalar]) -> dict[str, float] | None:
        """Set the trainable up on a worker and evaluate it untrained: its metrics.

        By this, a metric that is never returned is noticed before anything is trained. ``None`` if it cannot be
        told: not everything can be evaluated before it was trained.
        """

    @abstractmethod
    def start(self, worker: WorkerId, chain: Chain) -> None: ...

    @abstractmethod
    def amend(self, amendment: Amendment) -> None: ...

    @abstractmethod
    def stop(self, chain: ChainId, *, keep: bool = False) -> None:
        """Ask a chain to stop at its next step; it ends as ``stopped`` (or ``done``, when it was faster).

        With ``keep`` its state there is kept and reported first: nothing of it is trained again. A trainable that must
        be told before a step that its state will be kept (``announce``) trains one step more, unless it was.
        """

    @abstractmethod
    def wait(self, timeout: float | None) -> list[Report]:
        """Reports since the last call, in order; blocks until there is one or ``timeout`` seconds have passed.

        The first call reports ``WorkerJoined`` for each worker present.
        """

    def wake(self) -> None:  # noqa: B027  # most need none
        """Have a ``wait`` that trains in the caller's own thread return at the next step, even if with no report.

        Others return in time by themselves. Called from signal handlers: takes no lock.
        """

    def show(self, journal: Journal) -> AbstractContextManager[object]:
        """Where the workers' cluster has a page that shows plans to people, keep that of ``journal`` on it until the
        context is left. The page is a reader like others: nothing waits for it, and it may be out of reach."""
        return nullcontext()

    @property
    def page(self) -> str | None:
        """The address of that page, after ``open``, for people; ``None`` where there is none."""
        return None

    @abstractmethod
    def clock(self) -> float:
        """Now, in seconds, on the clock of the reports' ``at``."""

    @abstractmethod
    def close(self) -> None:
        """End what this executor started and nothing else. Idempotent."""
