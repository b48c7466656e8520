"""Runs audits on idle workers; training preempts them at once. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from hpstage.plan.facts import Audited, DriverId, WorkerId
from hpstage.plan.messages import Audit, AuditEnded, AuditId, StartAudit, StopAudit, host_of
from hpstage.scheduler.audit_draw import AuditDraw, Drawn
from hpstage.scheduler.workers import Worker

GRACE = 0.25
"""Minimum seconds that a worker is idle before it audits. Most chains are followed by the next one at once."""
_ROUNDING = 1e-6
"""Tolerance in seconds, since the clock may be slightly behind when the driver has waited for a time."""
_BEGINNING = 1.5
"""Seconds until the process of an audit trains, assumed before any was measured."""
_TRIES = 64
"""Maximum number of states to draw in search of one whose audit is short enough."""
_FAILURES = 3
"""Number of consecutive failures after which no more audits are tried."""


@dataclass(frozen=True, slots=True)
class RunningAudit:
    """An audit on a worker. ``began``: on the executor's clock. ``estimated``: the seconds of its steps."""

    audit: Audit
    drawn: Drawn
    worker: WorkerId
    began: float
    estimated: float


@dataclass(eq=False, repr=False)
class Audits:
    """The audits of one driver."""

    driver: DriverId  # makes the ids of audits unique
    draw: AuditDraw  # the states to audit, in order
    _started: int = 0
    running: dict[AuditId, RunningAudit] = field(default_factory=dict)
    _on: dict[WorkerId, AuditId] = field(default_factory=dict)
    _ending: set[AuditId] = field(default_factory=set)  # audits that were stopped, and may still run
    _displaced: set[AuditId] = field(default_factory=set)  # those of them that were stopped for a chain
    _idle_since: dict[WorkerId, float] = field(default_factory=dict)
    _nothing_left: bool = False  # no state is left to audit, until a further one is saved
    _failures: int = 0  # in a row
    _beginnings: list[float] = field(default_factory=list)  # seconds of recent audits, without those of their steps
    _rest_since: float | None = None  # when the search had nothing left to train

    def changed(self) -> None:
        """Record that there may be further states to audit."""
        self._nothing_left = False

    @property
    def wanted(self) -> bool:
        """Whether there may be states left to audit."""
        return not self._nothing_left and self._failures < _FAILURES

    def look(self, idle: Iterable[Worker], now: float, seconds: float | None = None) -> list[StartAudit]:
        """Start audits on workers that have been idle for a while. O(idle workers).

        Args:
            idle: workers that are ready for a chain but were given none.
            seconds: the maximum time that workers wait for audits. If set, only audits that are expected to end by then
                are started, and only in regimes not yet audited.
        """
        hosts = [worker.id for worker in idle if worker.id == worker.host and not worker.others]
        self._idle_since = {host: self._idle_since.get(host, now) for host in hosts}
        for host in hosts:
            if self._on.get(host) in self._displaced:
                self._drop(host)  # the chain has ended, so the report that the audit ended was lost
        found: list[StartAudit] = []
        for host, since in self._idle_since.items():
            if not self.wanted:
                break
            if host in self._on or (seconds is None and now + _ROUNDING < since + self._grace):
                continue
            begun = self._next(seconds)
            if begun is None:
                self._nothing_left = True
                break
            drawn, audit, estimated = begun
            self._started += 1
            self.running[audit.id] = RunningAudit(audit, drawn, host, now, estimated)
            self._on[host] = audit.id
            found.append(StartAudit(host, audit))
        return found

    def _next(self, seconds: float | None) -> tuple[Drawn, Audit, float] | None:
        """Draw the next audit, and estimate the seconds of its steps; see :meth:`look`."""
        for _ in range(_TRIES):
            drawn = self.draw.next(only_unseen=seconds is not None)
            if drawn is None:
                return None
            audit = self.draw.audit(drawn, AuditId(f"audit-{self.driver}-{self._started + 1}"))
            estimated = self.draw.seconds(audit)
            if seconds is None or estimated + self._beginning <= seconds:
                return drawn, audit, estimated
            self.draw.put_back(drawn)
        return None

    def rest(self, now: float, seconds: float) -> list[StopAudit]:
        """Record that the search has nothing left to train. End the audits that workers need not wait for: those not
        expected to end within ``seconds``, and those of a regime that was audited before."""
        self._rest_since = now
        self._nothing_left = False
        ends = {id: its.began + its.estimated + self._beginning for id, its in self.running.items()}
        return self._end(id for id, its in self.running.items() if its.drawn.seen or ends[id] > now + seconds)

    @property
    def _grace(self) -> float:
        """Seconds that a worker must be idle before it audits: the time that an audit takes to start training. A
        shorter pause is too short for an audit, which would only slow down workers that share resources with it."""
        return max(GRACE, self._beginning)

    @property
    def _beginning(self) -> float:
        return fmean(self._beginnings) if self._beginnings else _BEGINNING

    def due_at(self) -> float | None:
        """Return when the next idle worker has been idle long enough to audit; ``None`` if none will audit."""
        if not self.wanted or not self.draw:
            return None
        waiting = [since for host, since in self._idle_since.items() if host not in self._on]
        return min(waiting) + self._grace if waiting else None

    def make_way(self, workers: Iterable[WorkerId]) -> list[StopAudit]:
        """End the audits on these workers."""
        hosts = dict.fromkeys(map(host_of, workers)) if self._on else {}
        displaced = [self._on[host] for host in hosts if host in self._on]
        self._displaced.update(displaced)
        return self._end(displaced)

    def stop_all(self) -> list[StopAudit]:
        return self._end(self.running)

    def _end(self, audits: Iterable[AuditId]) -> list[StopAudit]:
        found = [id for id in list(audits) if id not in self._ending]
        self._ending.update(found)
        return [StopAudit(id) for id in found]

    def is_over(self, report: AuditEnded) -> bool:
        return report.audit not in self.running

    def fact(self, report: AuditEnded) -> Audited:
        """Return the fact that follows from the end of a running audit."""
        its = self.running[report.audit]
        waited = 0.0 if self._rest_since is None else max(0.0, report.at - max(self._rest_since, its.began))
        return Audited(
            of="segment" if its.audit.segment.captured else "trial",
            worker=its.worker,
            node=its.drawn.node,
            start=its.audit.segment.start,
            step=its.drawn.step,
            at=report.at,
            seconds=report.seconds,
            outcome=report.outcome,
            compared=report.compared,
            waited=waited,
            message=report.message,
        )

    def note(self, report: AuditEnded) -> list[str]:
        """Process the end of a running audit. Return messages for the user."""
        its = self.running.pop(report.audit)
        del self._on[its.worker]
        self._forget(report.audit)
        if report.outcome == "stopped":
            self.draw.put_back(its.drawn)
            self._nothing_left = False
            return []
        if report.outcome == "failed":
            self._failures += 1
            return self._failed(its.audit, report) if self._failures in (1, _FAILURES) else []
        self._failures = 0
        self._beginnings = [*self._beginnings[-7:], max(0.0, report.seconds - its.estimated)]
        return []

    def _failed(self, audit: Audit, report: AuditEnded) -> list[str]:
        what = f"steps {audit.segment.start} to {audit.segment.stop}"
        more = "" if self._failures == 1 else " Several in a row have failed: no more are tried."
        return [
            f"An audit on worker {report.worker} could not train {what} again: {report.message}. The search itself is "
            f"not affected.{more}"
        ]

    def forget(self, worker: WorkerId) -> None:
        """Record that a worker has left, and its audit with it."""
        self._idle_since.pop(worker, None)
        self._drop(worker)

    def _drop(self, worker: WorkerId) -> None:
        id = self._on.pop(worker, None)
        if id is not None:
            self._forget(id)
            self.draw.put_back(self.running.pop(id).drawn)

    def _forget(self, id: AuditId) -> None:
        self._ending.discard(id)
        self._displaced.discard(id)
