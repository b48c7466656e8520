"""InlineExecutor: trains in this process, one worker, for debugging. Breakpoints work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import ExitStack

from hpstage.checkpoints import CheckpointStore, LiveCache
from hpstage.errors import InternalError
from hpstage.execution.flight import Control
from hpstage.execution.runner import ChainRunner
from hpstage.executor import Environment, Executor
from hpstage.plan.facts import ChainId, WorkerId
from hpstage.plan.messages import Amendment, Chain, ChainEnded, ChainReport, Report, WorkerJoined
from hpstage.schedule import Scalar
from hpstage.trainable import Trainable
from hpstage.training.identity import threads
from hpstage.training.trainables import as_trainable

_WORKER = WorkerId("inline")


class InlineExecutor(Executor):
    """Has a single worker: this process. A chain runs inside ``wait``, up to its next report."""

    def __init__(self) -> None:
        self._trainable: Trainable | None = None
        self._runner: ChainRunner | None = None
        self._closing = ExitStack()
        self._events: deque[Report] = deque()
        self._running: tuple[ChainId, Generator[ChainReport | None, None, None], Control] | None = None

    def open(self, trainable: object, checkpoints: CheckpointStore | None) -> Environment:
        self._trainable = as_trainable(trainable)
        self._events.append(WorkerJoined(_WORKER, self.clock()))
        if checkpoints is not None:
            self.use(checkpoints)
        from hpstage.training.identity.environment import describe

        self._closing.enter_context(threads.restored())
        return describe(self._trainable)

    def use(self, checkpoints: CheckpointStore) -> None:
        assert self._trainable is not None, "open() comes first"
        self._runner = ChainRunner(self._trainable, checkpoints, LiveCache(), worker=_WORKER, clock=self.clock)

    def try_out(self, initial: Mapping[str, Scalar]) -> dict[str, float] | None:
        assert self._runner is not None, "use() comes first"
        return self._runner.try_out(initial)

    def start(self, worker: WorkerId, chain: Chain) -> None:
        if self._running is not None or worker != _WORKER:
            raise InternalError(f"{chain.id} was started on {worker}, which is not an idle worker here")
        assert self._runner is not None, "use() comes first"
        control = Control()
        self._running = chain.id, self._runner.run(chain, control), control

    def amend(self, amendment: Amendment) -> None:
        if self._running is not None and self._running[0] == amendment.chain:
            self._running[2].amend(amendment)

    def stop(self, chain: ChainId, *, keep: bool = False) -> None:
        if self._running is not None and self._running[0] == chain:
            self._running[2].stop(keep=keep)

    def wake(self) -> None:
        if self._running is not None:
            self._running[2].pause()

    def wait(self, timeout: float | None) -> list[Report]:
        if not self._events and self._running is not None:
            report = next(self._running[1])
            if report is None:
                return []
            self._events.append(report)
            if isinstance(report, ChainEnded):
                self._running = None
        if not self._events and self._running is None and timeout:
            time.sleep(timeout)  # other processes may be training for this driver
        events = list(self._events)
        self._events.clear()
        return events

    def clock(self) -> float:
        return time.time()

    def close(self) -> None:
        with self._closing:
            if self._running is not None:
                self._running[1].close()
                self._running = None
            close = getattr(self._trainable, "close", None)
            if close is not None:
                close()
            self._trainable = None
            self._events.clear()
