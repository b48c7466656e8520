"""Reports of workers and chains, collected for the driver."""

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
from hpstage.execution.flight import Gathering
from hpstage.plan.facts import ChainId, WorkerId
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

# Seconds by which a worker's clock may be off, including the transmission time of its reports.
_TRUSTED = 2.0


@dataclass(slots=True)
class _Running:
    worker: WorkerId
    gang: tuple[WorkerId, ...] = ()
    told: int = 0  # number of reports passed on so far
    ended: bool = False
    bereft: bool = False  # one of its gang has left
    refused: str = ""  # why one of its gang could not join it


class Inbox:
    """Passes on each report once, those of a chain in order, and none of a chain whose worker has left.

    Thread-safe for the driver's thread, Dask's loop and its callback thread. Independent of Dask.

    Args:
        clock: returns the time for reports about workers.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._reports: deque[Report] = deque()
        self._workers: dict[WorkerId, list[WorkerId]] = {}  # the lanes of each
        self._chains: dict[ChainId, _Running] = {}
        self._broken: HpstageError | None = None

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        with self._changed:
            return tuple(self._workers)

    def join(self, worker: WorkerId, lanes: int = 1) -> None:
        """Add a worker that trains so many chains side by side."""
        with self._changed:
            if worker not in self._workers:
                self._workers[worker] = names_of(worker, lanes)
                for lane in self._workers[worker]:
                    self._tell(WorkerJoined(lane, self._clock()))

    def leave(
        self, worker: WorkerId, reason: Literal["died", "closed", "unreachable"], message: str = ""
    ) -> list[ChainId]:
        """Remove a worker, with a ``message`` on the cause if known; return the chains lost with it."""
        with self._changed:
            if worker not in self._workers:
                return []
            lost = [chain for chain, running in self._chains.items() if host_of(running.worker) == worker]
            for chain in lost:
                del self._chains[chain]
            for running in self._chains.values():
                running.bereft |= worker in running.gang
            for lane in self._workers.pop(worker):
                self._tell(WorkerLeft(lane, self._clock(), reason, message))
            return lost

    def begin(self, chain: ChainId, worker: WorkerId, gang: tuple[WorkerId, ...] = ()) -> bool:
        """Record that a chain will start; return ``False`` if its worker has left, unknown to the driver so far."""
        with self._changed:
            if any(running.worker == worker and not running.ended for running in self._chains.values()):
                raise InternalError(f"{chain} was started on {worker}, which is not idle")
            if worker not in self._workers.get(host_of(worker), ()):
                return False
            self._chains[chain] = _Running(worker, gang, bereft=not self._workers.keys() >= set(gang))
            return True

    def refuse(self, chain: ChainId, why: str) -> bool:
        """Note that one of a running chain's gang could not join it; return ``False`` if it does not run."""
        with self._changed:
            running = self._chains.get(chain)
            if running is None or running.ended:
                return False
            running.refused = running.refused or why
            return True

    def bereft(self) -> list[ChainId]:
        """Return the running chains of whose gangs one has left."""
        with self._changed:
            return [chain for chain, running in self._chains.items() if running.bereft and not running.ended]

    def runs_on(self, chain: ChainId) -> WorkerId | None:
        """Return the worker of a chain that has started and has neither ended nor been lost."""
        with self._changed:
            running = self._chains.get(chain)
            return running.worker if running is not None and not running.ended else None

    def hear(self, chain: ChainId, first: int, encoded: list[bytes]) -> None:
        """Pass on the new ones among these reports of a chain, which are numbered from ``first``.

        After a gap, none is passed on: all of them are repeated in the task's result.
        """
        with self._changed:
            running = self._chains.get(chain)
            if running is None or first > running.told:
                return
            for text in encoded[running.told - first :]:
                report = decode_report(text)
                assert not isinstance(report, Gathering), "for the worker alone"
                running.told += 1
                if isinstance(report, ChainEnded) and report.outcome == "apart" and running.bereft:
                    report = replace(report, outcome="stopped")  # the others could have met
                elif isinstance(report, ChainEnded) and report.outcome == "stopped" and running.refused:
                    report = replace(report, outcome="apart", message=running.refused)
                running.ended = isinstance(report, ChainEnded)
                self._tell(self._dated(report))

    def audited(self, report: AuditEnded) -> None:
        """Pass on the end of an audit, unless its worker has left."""
        with self._changed:
            if report.worker in self._workers:
                self._tell(self._dated(report))

    def forget(self, chain: ChainId) -> None:
        """Remove a chain whose task has ended; if its end was not reported, the chain is lost."""
        with self._changed:
            running = self._chains.pop(chain, None)
            if running is not None and not running.ended:
                self._tell(ChainEnded(chain, running.worker, "lost", self._clock(), message="its task was cancelled"))

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
            reports = list(self._reports)
            self._reports.clear()
            return reports

    def _dated(self, report: Report) -> Report:
        """Replace the time of a report by this process's clock if the worker's is wrong. Otherwise the next loss of a
        worker whose clock is off by an hour would be counted as an hour of training."""
        if isinstance(report, BoundaryMissed):
            return report
        if isinstance(report, BoundaryReached):
            return replace(report, reached=replace(report.reached, at=self._trusted(report.reached.at)))
        return replace(report, at=self._trusted(report.at))

    def _trusted(self, at: float) -> float:
        now = self._clock()
        return at if abs(at - now) < _TRUSTED else now

    def _tell(self, report: Report) -> None:
        self._reports.append(report)
        self._changed.notify_all()
