"""What is heard of workers and chains, gathered for the driver."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from hpstage.cluster.messages import decode_report
from hpstage.errors import HpstageError, InternalError
from hpstage.plan.facts import ChainId, WorkerId
from hpstage.plan.messages import BoundaryMissed, BoundaryReached, ChainEnded, Report, WorkerJoined, WorkerLeft

# Seconds by which a worker's clock may be off, its reports' time under way included.
_TRUSTED = 2.0


@dataclass(slots=True)
class _Running:
    worker: WorkerId
    told: int = 0  # reports handed on so far
    ended: bool = False


class Inbox:
    """Hands each report on once, those of a chain in order, and none of a chain whose worker has left.

    Safe among the driver's thread, Dask's loop and its callback thread. Knows nothing of Dask.

    Args:
        clock: the time in reports about workers.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._reports: deque[Report] = deque()
        self._workers: set[WorkerId] = set()
        self._chains: dict[ChainId, _Running] = {}
        self._broken: HpstageError | None = None

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        with self._changed:
            return tuple(self._workers)

    def join(self, worker: WorkerId) -> None:
        with self._changed:
            if worker not in self._workers:
                self._workers.add(worker)
                self._tell(WorkerJoined(worker, self._clock()))

    def leave(
        self, worker: WorkerId, reason: Literal["died", "closed", "unreachable"], message: str = ""
    ) -> list[ChainId]:
        """A worker is gone, ``message`` says how if that is known; returns the chains that went with it."""
        with self._changed:
            if worker not in self._workers:
                return []
            self._workers.remove(worker)
            lost = [chain for chain, running in self._chains.items() if running.worker == worker]
            for chain in lost:
                del self._chains[chain]
            self._tell(WorkerLeft(worker, self._clock(), reason, message))
            return lost

    def begin(self, chain: ChainId, worker: WorkerId) -> bool:
        """A chain is about to start; ``False`` if its worker has left, which the driver is yet to read."""
        with self._changed:
            if any(running.worker == worker and not running.ended for running in self._chains.values()):
                raise InternalError(f"{chain} was started on {worker}, which is not idle")
            if worker not in self._workers:
                return False
            self._chains[chain] = _Running(worker)
            return True

    def runs_on(self, chain: ChainId) -> WorkerId | None:
        """The worker of a chain that has begun, and neither ended nor been lost."""
        with self._changed:
            running = self._chains.get(chain)
            return running.worker if running is not None and not running.ended else None

    def hear(self, chain: ChainId, first: int, encoded: list[bytes]) -> None:
        """Reports of a chain, numbered from ``first``: those that are new are handed on.

        After a gap none is: they all come again with the task's result.
        """
        with self._changed:
            running = self._chains.get(chain)
            if running is None or first > running.told:
                return
            for text in encoded[running.told - first :]:
                report = decode_report(text)
                running.told += 1
                running.ended = isinstance(report, ChainEnded)
                self._tell(self._dated(report))

    def forget(self, chain: ChainId) -> None:
        """A chain's task is over; if nobody has told the chain's end, it is lost."""
        with self._changed:
            running = self._chains.pop(chain, None)
            if running is not None and not running.ended:
                self._tell(ChainEnded(chain, running.worker, "lost", self._clock(), message="its task was cancelled"))

    def fail(self, error: HpstageError) -> None:
        """Nothing works from now on: once all reports are read, :meth:`wait` raises this."""
        with self._changed:
            self._broken = self._broken or error
            self._changed.notify_all()

    def wait(self, timeout: float) -> list[Report]:
        """Reports since the last call; blocks until there is one, for ``timeout`` seconds at most."""
        with self._changed:
            if not self._reports and self._broken is None:
                self._changed.wait(timeout)
            if not self._reports and self._broken is not None:
                raise self._broken
            reports = list(self._reports)
            self._reports.clear()
            return reports

    def _dated(self, report: Report) -> Report:
        """Dated by this process's clock where the worker's is wrong: one that is off by an hour would have the next
        loss of a worker counted as an hour of training."""
        if isinstance(report, BoundaryMissed):
            return report
        if isinstance(report, BoundaryReached):
            return BoundaryReached(replace(report.reached, at=self._trusted(report.reached.at)), report.failure)
        return replace(report, at=self._trusted(report.at))

    def _trusted(self, at: float) -> float:
        now = self._clock()
        return at if abs(at - now) < _TRUSTED else now

    def _tell(self, report: Report) -> None:
        self._reports.append(report)
        self._changed.notify_all()
