"""Executor port: trains chains on workers and reports; it makes no decisions."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import msgspec

from hpstage.errors import InternalError
from hpstage.errors.deprecation import deprecated
from hpstage.plan.devices import Devices
from hpstage.plan.facts import ChainId, StateKey, WorkerId
from hpstage.plan.messages import Amendment, Audit, AuditId, Chain, Report
from hpstage.schedule import Scalar

if TYPE_CHECKING:
    from hpstage.checkpoints import CheckpointStore
    from hpstage.store import Journal


class Environment(msgspec.Struct, frozen=True):
    """Description of a worker and its trainable; ``described`` and ``identity`` are part of the workload's key.

    Attributes:
        described: short names to strings, e.g. ``{"torch": "2.13.0", "device": "cpu", "isa": "AVX512", "threads": "1",
            "numerics": "eager-v1", "data": "1797 x 0f3a..."}``.
        identity: identity of the trainable's code and attributes as loaded on the worker (see
            :mod:`hpstage.training.identity.code_identity`). If empty, nothing is loaded there, and the identity that
            the driver computes is used.
        loaded: digests of the functions and modules loaded on the worker, and package versions, to find differences.
        remarks: messages for the user, logged once by the driver.
        warnings: warnings for the user, logged once by the driver.
    """

    described: dict[str, str]
    identity: dict[str, str] = {}
    loaded: dict[str, str] = {}
    remarks: list[str] = []
    warnings: list[str] = []


class Page(Protocol):
    """A web page that shows a search. The search reports the time left to it, which the page cannot estimate."""

    @property
    def is_watched(self) -> bool:
        """Whether any browser shows the page. The time left is estimated only then."""

    def show(self, study: str, seconds_left: float | None) -> None:
        """Show a new estimate of the time left in a study of the plan (``None``: unknown). Returns at once."""


class Executor(ABC):
    """Trains chains on workers.

    Contract. ``open`` is called once, first; it sends the trainable to the workers, sets it up far enough to
    describe the environment, and fails with a clear error before anything is trained: :class:`UsageError` for a
    trainable that cannot be sent, :class:`ClusterError` for a cluster without workers or devices, or whose workers
    differ in environment. ``start`` hands one chain to one idle worker that ``wait`` has reported, and returns at once.
    If that worker has been replaced since it was reported, the chain is lost with it. At most one chain per worker is
    in flight. Every started chain ends in exactly one ``ChainEnded`` (or, if its worker left, only in
    ``WorkerLeft``). Reports of a chain arrive in order. ``amend`` and ``stop`` are best effort: they may
    come too late, which the reports show. Only the driver's thread calls these methods.
    """

    worker_timeout: float = 60.0
    """Seconds without any worker, while there is work to do, after which the driver gives up."""

    widest: int = 1
    """After ``open``: the most workers that can train a chain together (``Chain.gang``)."""

    devices: Devices = Devices()
    """The devices on which the executor may train. Set before ``open``."""

    can_audit: bool = False
    """After ``open``: whether idle workers can repeat earlier training (:meth:`audit`)."""

    @abstractmethod
    def open(self, trainable: object, checkpoints: CheckpointStore | None) -> Environment:
        """Prepare the workers and return the environment that they share.

        ``checkpoints`` may be ``None`` here, since the store may depend on the environment's key. It must then be
        given with :meth:`use` before the first ``start``.
        """

    @property
    def pool(self) -> str:
        """Identifier of the workers' cluster, after ``open``. Drivers identify workers by pool and id.

        It may change when workers join after all had left.
        """
        return f"{socket.gethostname()}/{os.getpid()}/{id(self):x}"

    @abstractmethod
    def use(self, checkpoints: CheckpointStore) -> None:
        """Set the workers' checkpoint store. Called once, before the first ``start``."""

    @abstractmethod
    def try_out(self, initial: Mapping[str, Scalar]) -> dict[str, float] | None:
        """Set up the trainable on a worker, evaluate it untrained, and return its metrics.

        This detects a missing metric before anything is trained. Return ``None`` if the metrics cannot be determined:
        some trainables cannot be evaluated before they are trained.
        """

    def measure(self, initial: Mapping[str, Scalar], steps: float) -> dict[str, float] | None:
        """Measure the step backends of a trainable with the values at step 0. This may take minutes. Workers that share
        a machine measure concurrently, since they also slow each other down in training.

        A backend is not tried if it takes longer to begin than a worker takes to train ``steps`` steps eagerly.

        Return seconds by name, ``None`` if nothing could be measured. For each backend: ``"NAME"`` of a step, and
        ``"NAME begins"`` until the backend has begun. For a backend that trains several chains side by side also
        ``"NAME, K at a time"``, of a step of one and of two chains. For a backend that was not tried only ``"NAME
        untried"``, of ``steps`` steps trained eagerly.
        """
        return None

    def look_at(self, inputs: Iterable[str]) -> dict[str, str]:
        """Return the current digests of inputs of training (:mod:`hpstage.training.identity.inputs`) on a worker, by
        name, after ``open``. Inputs that cannot be read, or that training does not depend on, are left out."""
        return {}

    @property
    def present(self) -> int | None:
        """The number of workers, after ``open``; ``None`` if it is unknown until :meth:`wait` reports them."""
        return None

    @property
    def slots(self) -> int:
        """Upper bound on the number of chains that a worker trains side by side, after ``open``."""
        return 1

    def __init_subclass__(cls) -> None:
        if "lanes" in vars(cls):  # the property's name until 0.3
            deprecated(f"{cls.__name__}.lanes", "slots")
            cls.slots = cls.lanes  # type: ignore[method-assign]
        super().__init_subclass__()

    @property
    def lanes(self) -> int:
        """The name of :attr:`slots` until 0.3."""
        deprecated(f"{type(self).__name__}.lanes", "slots")
        return self.slots

    @abstractmethod
    def start(self, worker: WorkerId, chain: Chain) -> None:
        """Begin a chain on a worker that has a free slot; :meth:`wait` reports its progress."""

    @abstractmethod
    def amend(self, amendment: Amendment) -> None:
        """Change what a running chain does at steps ahead of it. Has no effect on a chain that has ended."""

    @abstractmethod
    def stop(self, chain: ChainId, *, keep: bool = False) -> None:
        """Request a chain to stop at its next step; it ends as ``stopped`` (or ``done``, if it was faster).

        With ``keep``, its state is saved and reported first, so that nothing is trained again. A trainable that must be
        notified before a step whose state will be saved (``announce``) trains one more step, unless it was notified.
        """

    def expect(self, worker: WorkerId, keys: Sequence[StateKey]) -> None:  # noqa: B027  # not needed by most
        """Suggest states that a worker may fetch while it trains: its next chains are expected to start from them,
        soonest first. This replaces an earlier suggestion. An executor may ignore it; it must not fail because of it.
        """

    def audit(self, worker: WorkerId, audit: Audit) -> None:
        """Begin an audit in a fresh process on a worker that trains nothing, and return at once. It must not slow down
        what other workers train.

        The audit ends in exactly one ``AuditEnded``, unless its worker leaves. If a chain is started on its worker, the
        audit ends as ``stopped`` before that chain trains, even without :meth:`stop_audit`. Called only if
        :attr:`can_audit`.
        """
        raise InternalError(f"{type(self).__name__} cannot audit")

    def stop_audit(self, audit: AuditId) -> None:  # noqa: B027  # not needed by those that cannot audit
        """End an audit at once. Has no effect on an audit that has ended."""

    def adapt(self, demand: Callable[[float, float], int]) -> None:  # noqa: B027  # for clusters that can grow
        """Let the number of workers follow ``demand(now, start_seconds)``: the number that the search can use if
        starting a worker takes ``start_seconds``. Called once, before the first :meth:`wait`. ``demand`` may only be
        called within :meth:`wait`. Workers that are training must not be removed."""

    @abstractmethod
    def wait(self, timeout: float | None) -> list[Report]:
        """Return the reports since the last call, in order; block until there is one or for ``timeout`` seconds.

        The first call reports ``WorkerJoined`` for each worker present.
        """

    def wake(self) -> None:  # noqa: B027  # not needed by most
        """Make a ``wait`` that trains in the caller's thread return at the next step, even without a report.

        Other executors return in time anyway. Called from signal handlers: must not take a lock.
        """

    def show(self, journal: Journal) -> AbstractContextManager[Page | None]:
        """Show the plan of ``journal`` on the cluster's web page until the context is left, which yields the page, or
        ``None`` if the cluster has none. The search does not wait for the page, which may be unreachable."""
        return nullcontext()

    @property
    def page(self) -> str | None:
        """The address of the cluster's web page, after ``open``, for the user; ``None`` if it has none."""
        return None

    @abstractmethod
    def clock(self) -> float:
        """Return the current time, in seconds, on the clock of the reports' ``at``."""

    @abstractmethod
    def close(self) -> None:
        """Shut down everything that this executor started and nothing else. Idempotent."""
