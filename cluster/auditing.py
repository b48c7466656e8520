"""Audits on a worker, in a fresh training process that is killed as soon as the worker is needed for training."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary

from distributed import Worker
from msgspec.structs import replace

from hpstage.cluster.feed import publish
from hpstage.cluster.messages import BeginAudit, Load, Retrain, decode_loaded, decode_retrained, encode
from hpstage.cluster.trainer import Trainer, TrainingProcessLost
from hpstage.execution.retraining import Retrained
from hpstage.executor import Environment
from hpstage.plan.facts import WorkerId
from hpstage.plan.messages import Audit, AuditEnded, AuditId

_running: WeakKeyDictionary[Worker, set[Auditing]] = WeakKeyDictionary()


async def make_way(worker: Worker) -> None:
    """End all audits on a worker that is about to train; return once their processes have ended."""
    for auditing in list(_running.get(worker, ())):
        await auditing.end()


class Auditing:
    """The audit of one run on a worker, if there is one.

    Args:
        topic: topic to which the end of the audit is reported.
        load: the trainable.
        described: returns the environment of the run's training process.
    """

    def __init__(self, topic: str, worker: Worker, load: Load, described: Callable[[], Environment | None]) -> None:
        self._topic = topic
        self._worker = worker
        self._load = load
        self._described = described
        self._audit: AuditId | None = None
        self._ending = False
        self._trainer: Trainer | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, order: BeginAudit, *, refused: bool) -> None:
        """Begin an audit, or report at once that it was stopped because the worker trains something else."""
        if refused or self._task is not None:
            self._report(AuditEnded(order.audit.id, WorkerId(self._worker.address), time.time(), "stopped", 0.0))
            return
        self._audit, self._ending = order.audit.id, False
        _running.setdefault(self._worker, set()).add(self)
        self._task = asyncio.create_task(self._run(order))

    async def end(self, audit: AuditId | None = None) -> None:
        """End the audit at once. If ``audit`` is given, end only the audit of that name."""
        task = self._task
        if task is None or (audit is not None and audit != self._audit):
            return
        self._ending = True
        if self._trainer is not None:
            self._trainer.kill()
        await asyncio.shield(task)

    async def _run(self, order: BeginAudit) -> None:
        began = time.monotonic()
        try:
            ended = await self._retrained(order)
        except TrainingProcessLost as error:
            ended = AuditEnded(order.audit.id, WorkerId(""), 0.0, "failed", 0.0, message=f"the process {error}")
        except Exception as error:
            ended = AuditEnded(order.audit.id, WorkerId(""), 0.0, "failed", 0.0, message=repr(error))
        finally:
            trainer, self._trainer = self._trainer, None
            if trainer is not None:
                trainer.kill()
                await trainer.ended()
            self._task = None
            _running[self._worker].discard(self)
        if self._ending and ended.outcome == "failed":  # an outcome found before the end is kept
            ended = replace(ended, outcome="stopped", message="")
        seconds = time.monotonic() - began
        self._report(replace(ended, worker=WorkerId(self._worker.address), at=time.time(), seconds=seconds))

    async def _retrained(self, order: BeginAudit) -> AuditEnded:
        self._trainer = trainer = await Trainer.start(self._worker)
        if self._ending:
            raise TrainingProcessLost("was not needed any more")
        _give_way(trainer.pid)
        trainer.send(self._load)
        loaded = await trainer.answer(decode_loaded)
        if loaded.problem is not None:
            return _failed(order.audit, loaded.problem.summary)
        if loaded.environment != self._described():
            return _failed(order.audit, "a new process loads other code or data than the worker has: files were edited")
        trainer.send(Retrain(order.audit.segment, order.checkpoints))
        return _outcome(order.audit, await trainer.answer(decode_retrained))

    def _report(self, ended: AuditEnded) -> None:
        publish(self._worker, self._topic, {"audited": encode(ended)})


def _failed(audit: Audit, message: str) -> AuditEnded:
    return AuditEnded(audit.id, WorkerId(""), 0.0, "failed", 0.0, message=message)


def _outcome(audit: Audit, found: Retrained) -> AuditEnded:
    if found.problem is not None:
        # A missing state, such as one that was evicted in the time since, is no failure.
        gone = found.problem.kind == "unreadable"
        ended = _failed(audit, found.problem.text)
        return replace(ended, outcome="stopped") if gone else ended
    ended = AuditEnded(audit.id, WorkerId(""), 0.0, "equal", 0.0, compared=found.states)
    if found.apart is None:
        return ended
    return replace(ended, outcome="differs", step=found.apart.step, where=found.apart.what)


def _give_way(pid: int) -> None:
    """Give a single-threaded process the lowest priority: it runs only on an idle core, and is killed first when memory
    runs out."""
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "w") as file:
        file.write("1000")
