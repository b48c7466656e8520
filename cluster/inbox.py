"""The inbox that collects reports about workers and chains for the driver."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from hpstage.cluster.messages import decode_report
from hpstage.errors import HpstageError, InternalError
from hpstage.execution.flight import Gathering
from hpstage.plan.facts import ChainId, Departure, StateRef, WorkerId
from hpstage.plan.messages import (
    AuditEnded,
    BoundaryMissed,
    BoundaryReached,
    ChainEnded,
    Report,
    WorkerJoined,
    WorkerLeft,
    host_of,
    names_of,
)

# Maximum seconds by which a worker's time is trusted to be off, including the transmission time of its reports.
_TRUSTED = 2.0
# Maximum seconds that the report of a chain's last state waits for the report of its end, which follows at once. The
# driver then handles both together, at the cost of one.
_TOGETHER = 0.01


@dataclass(slots=True)
class _Present:
    """A worker that has joined and not left."""

    slots: list[WorkerId]
    incarnation: str
    read: bool = False  # whether the driver has read that the worker joined
    leads: dict[ChainId, _Running] = field(default_factory=dict)  # chains that were sent to it
    follows: dict[ChainId, _Running] = field(default_factory=dict)  # chains whose gangs it belongs to


@dataclass(slots=True)
class _Running:
    """A chain that was sent to a worker, until its task ends."""

    worker: WorkerId
    gang: tuple[WorkerId, ...] = ()
    delivered: int = 0  # number of reports delivered so far
    ended: bool = False
    last: StateRef | None = None  # the state with which it ends, unless it is amended
    refused: str = ""  # why a worker could not join its gang


class Inbox:
    """Delivers each report once, the reports of a chain in order, and none of a chain whose worker has left.

    When a worker's training process is replaced, the worker has a new *incarnation*. Chains that the driver starts are
    for the incarnations that it knows: those whose joining it has read.

    Thread-safe for the driver's thread, Dask's loop and its callback thread. Independent of Dask.

    Args:
        clock: returns the time for reports about workers.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._changed = threading.Condition()  # its lock is reentrant
        self._reports: deque[Report] = deque()
        self._workers: dict[WorkerId, _Present] = {}
        self._unread: list[_Present] = []  # workers whose joining the driver has not read yet
        self._chains: dict[ChainId, _Running] = {}
        self._orphaned: dict[ChainId, _Running] = {}
        self._ending: set[ChainId] = set()  # chains that have reported their last state, but not their end
        self._broken: HpstageError | None = None

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        with self._changed:
            return tuple(self._workers)

    def incarnation_of(self, worker: WorkerId) -> str:
        """Return the current incarnation of a worker, or an empty string if it is not present."""
        with self._changed:
            return self._workers[worker].incarnation if worker in self._workers else ""

    def join(self, worker: WorkerId, incarnation: str, slots: int = 1) -> list[ChainId]:
        """Add a worker with ``slots`` slots. Return the chains lost with its previous incarnation, if that has not been
        reported as lost yet."""
        with self._changed:
            lost: list[ChainId] = []
            if worker in self._workers:
                if self._workers[worker].incarnation == incarnation:
                    return lost
                lost = self.leave(worker, "died", "its training process was replaced")
            present = self._workers[worker] = _Present(names_of(worker, slots), incarnation)
            self._unread.append(present)
            for slot in present.slots:
                self._put(WorkerJoined(slot, self._clock()))
            return lost

    def leave(
        self, worker: WorkerId, reason: Departure, message: str = "", *, incarnation: str | None = None
    ) -> list[ChainId]:
        """Remove a worker, and return the chains lost with it.

        Args:
            message: the cause, if known.
            incarnation: remove the worker only if this is its current incarnation.
        """
        with self._changed:
            present = self._workers.get(worker)
            if present is None or incarnation not in (None, present.incarnation):
                return []
            trained = {running.worker for running in present.leads.values() if not running.ended}
            lost = list(present.leads)
            for chain in lost:
                self._drop(chain)
            self._orphaned |= present.follows
            for slot in self._workers.pop(worker).slots:
                # A chain that the driver starts on this slot before it reads this report is not to blame.
                blameless = reason == "died" and slot not in trained
                self._put(WorkerLeft(slot, self._clock(), "closed" if blameless else reason, message))
            return lost

    def _drop(self, chain: ChainId) -> _Running | None:
        """Remove a chain; return it, or ``None`` if there was no such chain."""
        running = self._chains.pop(chain, None)
        if running is not None:
            self._orphaned.pop(chain, None)
            self._ending.discard(chain)
            del self._workers[host_of(running.worker)].leads[chain]
            for member in running.gang:
                if member in self._workers:
                    self._workers[member].follows.pop(chain, None)
        return running

    def begin(
        self, chain: ChainId, worker: WorkerId, gang: tuple[WorkerId, ...] = (), *, last: StateRef | None = None
    ) -> list[str]:
        """Record that a chain starts.

        Args:
            last: the state with which the chain ends.

        Returns:
            The incarnations to send it to: of its worker and of its gang's workers, ``""`` for those that have left. An
            empty list if its worker has left.
        """
        with self._changed:
            present = self._read(host_of(worker))
            if present is None or worker not in present.slots:
                return []
            if any(running.worker == worker and not running.ended for running in present.leads.values()):
                raise InternalError(f"{chain} was started on {worker}, which is not idle")
            members = [self._read(member) for member in gang]
            running = self._chains[chain] = present.leads[chain] = _Running(worker, gang, last=last)
            for member in members:
                if member is None:
                    self._orphaned[chain] = running
                else:
                    member.follows[chain] = running
            return [member.incarnation if member is not None else "" for member in (present, *members)]

    def _read(self, worker: WorkerId) -> _Present | None:
        """Return a worker if the driver has read that its current incarnation has joined, else ``None``."""
        present = self._workers.get(worker)
        return present if present is not None and present.read else None

    def refuse(self, chain: ChainId, why: str) -> bool:
        """Record that a worker could not join the gang of a chain. Return ``False`` if the chain is not running."""
        with self._changed:
            running = self._chains.get(chain)
            if running is None or running.ended:
                return False
            running.refused = running.refused or why
            return True

    def orphaned(self) -> list[ChainId]:
        """Return the running chains whose gang has lost a worker."""
        with self._changed:
            return [chain for chain, running in self._orphaned.items() if not running.ended]

    def runs_on(self, chain: ChainId) -> WorkerId | None:
        """Return the worker of a running chain; ``None`` if the chain has ended, is lost or was never started."""
        with self._changed:
            running = self._chains.get(chain)
            return running.worker if running is not None and not running.ended else None

    def receive(self, chain: ChainId, first: int, encoded: list[bytes]) -> None:
        """Deliver the new ones of a chain's reports, which are numbered from ``first`` on.

        After a gap, no report is delivered; the result of the chain's task repeats all reports.
        """
        with self._changed:
            running = self._chains.get(chain)
            if running is None or first > running.delivered:
                return
            for text in encoded[running.delivered - first :]:
                report = decode_report(text)
                assert not isinstance(report, Gathering), "is only for the worker"
                running.delivered += 1
                if isinstance(report, ChainEnded) and report.outcome == "apart" and chain in self._orphaned:
                    report = replace(report, outcome="stopped")  # only since a worker has left
                elif isinstance(report, ChainEnded) and report.outcome == "stopped" and running.refused:
                    report = replace(report, outcome="apart", message=running.refused)
                running.ended = isinstance(report, ChainEnded)
                if (
                    isinstance(report, BoundaryReached)
                    and StateRef(report.reached.node, report.reached.step) == running.last
                ):
                    self._ending.add(chain)
                else:
                    self._ending.discard(chain)
                self._put(self._dated(report))

    def audited(self, report: AuditEnded) -> None:
        """Deliver the end of an audit, unless its worker has left."""
        with self._changed:
            if report.worker in self._workers:
                self._put(self._dated(report))

    def forget(self, chain: ChainId) -> None:
        """Remove a chain whose task has ended. If the chain's end was not reported, report the chain as lost."""
        with self._changed:
            running = self._drop(chain)
            if running is not None and not running.ended:
                self._put(ChainEnded(chain, running.worker, "lost", self._clock(), message="its task was cancelled"))

    def fail(self, error: HpstageError) -> None:
        """Record a fatal error: once all reports are read, :meth:`wait` raises it."""
        with self._changed:
            self._broken = self._broken or error
            self._changed.notify_all()

    def wait(self, timeout: float) -> list[Report]:
        """Return the reports since the last call; block until there is one, for at most ``timeout`` seconds."""
        with self._changed:
            if not self._reports and self._broken is None:
                self._changed.wait(timeout)
            if not self._reports and self._broken is not None:
                raise self._broken
            if self._ending:
                self._changed.wait_for(lambda: not self._ending or self._broken is not None, min(timeout, _TOGETHER))
            reports = list(self._reports)
            self._reports.clear()
            for present in self._unread:
                present.read = True
            self._unread.clear()
            return reports

    def _dated(self, report: Report) -> Report:
        """Replace a report's time by the time of this process if the worker's clock is wrong. Otherwise, if a worker
        with a clock that is off by an hour is lost, an hour would be counted as training."""
        if isinstance(report, BoundaryMissed):
            return report
        if isinstance(report, BoundaryReached):
            return replace(report, reached=replace(report.reached, at=self._trusted(report.reached.at)))
        return replace(report, at=self._trusted(report.at))

    def _trusted(self, at: float) -> float:
        now = self._clock()
        return at if abs(at - now) < _TRUSTED else now

    def _put(self, report: Report) -> None:
        self._reports.append(report)
        self._changed.notify_all()
