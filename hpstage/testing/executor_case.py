"""Shared parts of the tests of executors: opening an executor, checking its work, and audits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest
from msgspec.structs import replace

from hpstage.checkpoints import FolderCheckpoints
from hpstage.errors import InternalError
from hpstage.executor import Executor
from hpstage.plan.facts import ChainId, WorkerId, to_numbers
from hpstage.plan.messages import Audit, AuditEnded, AuditId, ChainEnded, Compared, Report, Segment
from hpstage.testing.chains import chain, ended, key, outcome, reached, stage, until, workers
from hpstage.testing.toys import Counter, Gate

Open = Callable[..., Executor]
ENDLESS = 10**9
"""Steps of a chain that is not meant to reach its end."""


class ExecutorCase:
    """Fixtures that open the executor under test, and helpers of the tests."""

    n_workers: ClassVar[int] = 1
    """Number of workers of a new executor."""
    trains: ClassVar[bool] = True
    """Whether trainables are actually trained, and states actually saved."""
    within_wait: ClassVar[bool] = False
    """Whether chains are trained only within :meth:`Executor.wait`, by the caller's thread."""

    @pytest.fixture
    def make_executor(self) -> Callable[[], Executor]:
        """A function that makes an executor, without opening it. The suite closes it."""
        raise NotImplementedError("override the fixture make_executor")

    def settle(self, executor: Executor) -> None:
        """Wait until all orders have reached the workers; by default they arrive immediately."""

    def everyone(self, executor: Executor) -> list[WorkerId]:
        """Wait until all workers have joined. Return the workers."""
        return workers(executor, self.n_workers)

    def first(self, executor: Executor) -> WorkerId:
        return self.everyone(executor)[0]

    @pytest.fixture
    def open_executor(self, make_executor: Callable[[], Executor], tmp_path: Path) -> Iterator[Open]:
        with ExitStack() as closing:

            def open_executor(trainable: object = None) -> Executor:
                executor = make_executor()
                closing.callback(executor.close)
                executor.open(
                    Counter() if trainable is None else trainable, FolderCheckpoints(tmp_path / "states", "w")
                )
                return executor

            yield open_executor

    @pytest.fixture
    def executor(self, open_executor: Open) -> Executor:
        return open_executor()

    @pytest.fixture
    def gate(self, tmp_path: Path) -> Gate:
        return Gate(tmp_path)

    @pytest.fixture
    def held_at_5(self, open_executor: Open, gate: Gate) -> Callable[[int], Executor]:
        """A function that starts the chain ``"c"`` with the given number of steps, and returns when step 5 is reported.

        The chain continues when the gate is opened.
        """

        def start(steps: int) -> Executor:
            if not self.within_wait:
                gate.shut(5)
            executor = open_executor(Counter(gate))
            executor.start(self.first(executor), chain("c", steps, 5))
            until(executor, lambda reports: bool(reached(reports, "c")))
            if not self.within_wait:
                gate.wait()
            return executor

        return start

    def _need_training(self) -> None:
        if not self.trains:
            pytest.skip("this executor does not train")

    def _check_total(self, metrics: dict[str, float | str] | None, total: float) -> None:
        assert metrics is not None
        if self.trains:
            assert to_numbers(metrics)["total"] == total

    def _check_works(self, executor: Executor, worker: WorkerId) -> None:
        executor.start(worker, chain("good", 5))
        reports = ended(executor, "good")
        assert outcome(reports, "good").outcome == "done"
        assert {chain_of(report) for report in reports} == {"good"}
        assert executor.wait(0.0) == []


def chain_of(report: Report) -> ChainId | None:
    return getattr(report, "chain", None)


class Audits(ExecutorCase):
    """Tests of audits. An executor that cannot audit must refuse an audit."""

    def _audit(self, executor: Executor, worker: WorkerId, stop: int = 10) -> Audit:
        """Train a chain. Return an audit of its steps from step 5 on, which is not started yet."""
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
        """Request an audit until it begins, since a worker becomes idle shortly after its chain has reported its end.
        Return the end of the audit."""
        for _ in range(1000):
            executor.audit(worker, audit)
            [end] = audits_ended(until(executor, lambda received: bool(audits_ended(received))))
            if end.outcome != "stopped" or end.seconds > 0:
                return end
        raise AssertionError(f"{worker} has ended its chain, but does not begin the audit: {end}")

    def _auditor(self, executor: Executor) -> WorkerId:
        """Return a worker that can audit. If the executor cannot audit, check that it refuses, and skip the test."""
        worker = self.first(executor)
        if not executor.can_audit:
            audit = self._audit(executor, worker)
            with pytest.raises(InternalError, match="cannot audit"):
                executor.audit(worker, audit)
            executor.stop_audit(AuditId("a"))
            pytest.skip("this executor cannot audit")
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

    def test_an_audit_from_a_missing_state_ends_without_a_verdict(self, executor: Executor) -> None:
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
