"""Audits on simulated workers."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

from hpstage.errors import InternalError
from hpstage.execution.course import Course
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.execution.simulated_chain import SimulatedChain
from hpstage.execution.simulated_cluster import SimulatedCluster
from hpstage.plan.facts import AuditOutcome, ChainId, StateKey, WorkerId
from hpstage.plan.messages import Audit, AuditEnded, AuditId, Chain, host_of, names_of


class AuditingExecutor(SimulatedExecutor):
    """Simulated workers that audit.

    Args:
        audit_seconds: time until an audit trains; ``None``: none can be begun.
        inexact: keys of states that are another each time they are trained.
        options: those of :class:`SimulatedExecutor`.
    """

    def __init__(
        self,
        workers: int | SimulatedCluster,
        *,
        audit_seconds: float | None = None,
        inexact: Container[StateKey] = (),
        **options: Any,
    ) -> None:
        self._audit_seconds = audit_seconds
        self.can_audit = audit_seconds is not None
        self._inexact = inexact
        self._audits: dict[WorkerId, tuple[Audit, float]] = {}  # by their workers, with the times at which they began
        super().__init__(workers, **options)

    def audit(self, worker: WorkerId, audit: Audit) -> None:
        if self._audit_seconds is None:
            super().audit(worker, audit)
            return
        if self.cluster.busy(names_of(worker, self.slots)) or worker in self._audits:
            raise InternalError(f"{audit.id} was begun on {worker}, which is not idle")
        self._audits[worker] = audit, self.clock()
        self.cluster.at(self._audit_seconds + self._seconds_of(audit), lambda: self._finish(worker, audit))

    def stop_audit(self, audit: AuditId) -> None:
        for worker in [worker for worker, (one, _) in self._audits.items() if one.id == audit]:
            self._end_audit(worker, "stopped")

    def start(self, worker: WorkerId, chain: Chain) -> None:
        for host in {host_of(slot) for slot in (worker, *chain.gang)}:
            self._end_audit(host, "stopped")
        super().start(worker, chain)

    def lose(self, slots: Sequence[WorkerId]) -> None:
        for slot in slots:
            self._audits.pop(slot, None)
        super().lose(slots)

    def close(self) -> None:
        self._audits.clear()
        super().close()

    def _seconds_of(self, audit: Audit) -> float:
        segment, start, now = audit.segment, audit.segment.start, 0.0
        chain = Chain(ChainId(audit.id), segment.source, segment.initial, segment.stages, ())
        course, seconds = Course(chain), self._step_seconds
        alone = SimulatedChain(chain, WorkerId(""), course, seconds, start, now, start, start, now, 0.0, None)
        return alone.seconds_between(start, segment.stop)

    def _finish(self, worker: WorkerId, audit: Audit) -> None:
        if worker in self._audits and self._audits[worker][0] is audit:
            compared = audit.segment.compared
            differs = next((one.step for one in compared if one.key in self._inexact), None)
            self._end_audit(worker, "equal" if differs is None else "differs", len(compared), differs)

    def _end_audit(self, worker: WorkerId, outcome: AuditOutcome, compared: int = 0, step: int | None = None) -> None:
        if worker in self._audits:
            audit, began = self._audits.pop(worker)
            seconds = self.clock() - began
            self.inbox.append(AuditEnded(audit.id, worker, self.clock(), outcome, seconds, compared, step))
