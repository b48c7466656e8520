"""The part of ExecutorContract that concerns audits."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hpstage.errors import InternalError
from hpstage.executor import Executor
from hpstage.plan.facts import WorkerId
from hpstage.plan.messages import Audit, AuditEnded, AuditId, ChainEnded, Compared, Report, Segment
from hpstage.testing.chains import chain, ended, key, outcome, reached, stage, until
from hpstage.testing.executor_case import ENDLESS, ExecutorCase


class Audits(ExecutorCase):
    """An executor that cannot audit refuses one; these are the others' obligations."""

    def _audit(self, executor: Executor, worker: WorkerId, stop: int = 10) -> Audit:
        """Train a chain, and return an audit of its steps from the 5th on, which is queued."""
        executor.start(worker, chain("audited", 10, 5))
        digests = {r.step: r.kept.digest for r in reached(ended(executor, "audited"), "audited") if r.kept is not None}
        segment = Segment(
            initial={"x": 1.0},
            stages=(stage(5, stop),),
            stop=stop,
            source=key(5),
            compared=(Compared(stop, key(10), digests[10]),),
        )
        return Audit(AuditId("a"), segment)

    def _ended(self, executor: Executor, worker: WorkerId, audit: Audit) -> AuditEnded:
        """Retry an audit until it begins, and return its end. A worker is idle shortly after its chain has reported its
        end."""
        for _ in range(1000):
            executor.audit(worker, audit)
            [end] = audits_ended(until(executor, lambda received: bool(audits_ended(received))))
            if end.outcome != "stopped" or end.seconds > 0:
                return end
        raise AssertionError(f"{worker} has ended its chain, but begins no audit: {end}")

    def _auditor(self, executor: Executor) -> WorkerId:
        """Return a worker that can audit."""
        worker = self.first(executor)
        if not executor.can_audit:
            audit = self._audit(executor, worker)
            with pytest.raises(InternalError, match="cannot audit"):
                executor.audit(worker, audit)
            executor.stop_audit(AuditId("a"))
            pytest.skip("it cannot audit")
        return worker

    def test_an_audit_trains_again_from_a_kept_state_or_from_nothing(self, executor: Executor) -> None:
        worker = self._auditor(executor)
        audit = self._audit(executor, worker)
        whole = replace(audit.segment, source=None, stages=(stage(0, 10),), captured=False)
        for one in (audit, Audit(AuditId("whole"), whole)):
            end = self._ended(executor, worker, one)
            assert (end.audit, end.worker, end.outcome) == (one.id, worker, "equal"), end
            assert end.compared == 1 and end.seconds >= 0
        self._check_works(executor, worker)

    def test_an_audit_reports_after_which_step_a_state_differs(self, executor: Executor) -> None:
        self._need_training()
        worker = self._auditor(executor)
        audit = self._audit(executor, worker)
        wrong = replace(audit.segment.compared[0], digest="0" * 32)
        end = self._ended(executor, worker, replace(audit, segment=replace(audit.segment, compared=(wrong,))))
        assert (end.outcome, end.step) == ("differs", 10), end
        assert end.where
        self._check_works(executor, worker)

    def test_an_audit_from_a_state_that_is_gone_says_nothing(self, executor: Executor) -> None:
        self._need_training()
        worker = self._auditor(executor)
        audit = self._audit(executor, worker)
        end = self._ended(executor, worker, replace(audit, segment=replace(audit.segment, source=key(7))))
        assert end.outcome == "stopped", end

    def test_an_audit_that_is_stopped_ends_at_once(self, executor: Executor) -> None:
        worker = self._auditor(executor)
        audit = self._audit(executor, worker, stop=ENDLESS)
        executor.audit(worker, audit)
        executor.stop_audit(audit.id)
        [end] = audits_ended(until(executor, lambda received: bool(audits_ended(received))))
        assert (end.outcome, end.compared) == ("stopped", 0)
        executor.stop_audit(audit.id)
        self._check_works(executor, worker)

    def test_an_audit_makes_way_for_a_chain_on_its_worker(self, executor: Executor) -> None:
        worker = self._auditor(executor)
        audit = self._audit(executor, worker, stop=ENDLESS)
        executor.audit(worker, audit)
        executor.start(worker, chain("c", 3))
        reports = until(executor, lambda received: bool(audits_ended(received)) and _has_ended(received, "c"))
        assert [end.outcome for end in audits_ended(reports)] == ["stopped"]
        assert outcome(reports, "c").outcome == "done"


def _has_ended(reports: list[Report], name: str) -> bool:
    return any(isinstance(report, ChainEnded) and report.chain == name for report in reports)


def audits_ended(reports: list[Report]) -> list[AuditEnded]:
    return [report for report in reports if isinstance(report, AuditEnded)]
