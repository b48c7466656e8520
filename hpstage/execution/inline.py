"""InlineExecutor: trains in this process, for debugging. Breakpoints work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack

from msgspec.structs import replace

from hpstage.checkpoints import CheckpointStore, LiveCache
from hpstage.execution import outcomes
from hpstage.execution.bundle import Bundle, slots_in
from hpstage.execution.control import Control
from hpstage.execution.flight import Gathering
from hpstage.execution.trying_out import measured
from hpstage.execution.untrained import UntrainedFork
from hpstage.executor import Environment, Executor
from hpstage.plan.facts import ChainId, WorkerId
from hpstage.plan.messages import Amendment, Chain, Report, WorkerJoined, names_of
from hpstage.schedule import Scalar
from hpstage.trainable import Trainable, close, is_bundling
from hpstage.training.identity import threads
from hpstage.training.identity.inputs import inputs_of
from hpstage.training.randomness import generators_restored
from hpstage.training.trainables import as_trainable

_WORKER = WorkerId("inline")


class InlineExecutor(Executor):
    """Trains in this process. Chains run inside ``wait``, up to the next report: one at a time, or as a bundle.

    Training uses the global random generators as in a process of its own. Their states are restored afterwards for the
    user's space, sampler and callbacks, which may draw from them in between.
    """

    def __init__(self) -> None:
        self._trainable: Trainable | None = None
        self._checkpoints: CheckpointStore | None = None
        self._bundle: Bundle | None = None
        self._untrained: UntrainedFork | None = None
        self._closing = ExitStack()
        self._events: deque[Report] = deque()

    def open(self, trainable: object, checkpoints: CheckpointStore | None) -> Environment:
        self._trainable = as_trainable(trainable)
        outcomes.causes = {}
        slots = names_of(_WORKER, slots_in(self._trainable))
        self._events += [WorkerJoined(slot, self.clock()) for slot in slots]
        if checkpoints is not None:
            self.use(checkpoints)
        from hpstage.training.identity.environment import describe

        self._closing.enter_context(threads.restored())
        self._closing.enter_context(generators_restored())
        found = describe(self._trainable)
        self.devices.check([found.described])
        if not is_bundling(self._trainable) and (untrained := UntrainedFork.made(self._trainable)) is not None:
            self._untrained = untrained
            self._closing.callback(untrained.close)
        return replace(found, described=self.devices.seen(found.described))

    def use(self, checkpoints: CheckpointStore) -> None:
        assert self._trainable is not None, "open() comes first"
        self._checkpoints = checkpoints
        self._bundle = Bundle(
            self._trainable, checkpoints, LiveCache(), worker=_WORKER, clock=self.clock, untrained=self._untrained
        )

    def put_back(self) -> None:
        """Put the user's object back to how it was before training. A chain that follows sets it up again."""
        assert self._bundle is not None, "use() comes first"
        assert self._checkpoints is not None
        self._bundle.close()
        self._untrained = None  # it has ended with the bundle
        close(self._trainable)
        self.use(self._checkpoints)

    def try_out(self, initial: Mapping[str, Scalar]) -> dict[str, float] | None:
        assert self._bundle is not None, "use() comes first"
        with generators_restored():
            return self._bundle.try_out(initial)

    def measure(self, initial: Mapping[str, Scalar], steps: float) -> dict[str, float] | None:
        assert self._trainable is not None, "open() comes first"
        return measured(self._trainable, initial, steps)

    def look_at(self, inputs: Iterable[str]) -> dict[str, str]:
        assert self._trainable is not None, "open() comes first"
        return inputs_of(self._trainable).now(inputs)

    @property
    def present(self) -> int:
        return 1

    @property
    def slots(self) -> int:
        assert self._trainable is not None, "open() comes first"
        return slots_in(self._trainable)

    def start(self, worker: WorkerId, chain: Chain) -> None:
        assert self._bundle is not None, "use() comes first"
        self._bundle.start(worker, chain, Control())

    def amend(self, amendment: Amendment) -> None:
        if self._bundle is not None and (control := self._bundle.control(amendment.chain)) is not None:
            control.amend(amendment)

    def stop(self, chain: ChainId, *, keep: bool = False) -> None:
        if self._bundle is not None and (control := self._bundle.control(chain)) is not None:
            control.stop(keep=keep)

    def wake(self) -> None:
        if self._bundle is not None:
            self._bundle.pause()

    def wait(self, timeout: float | None) -> list[Report]:
        if not self._events and self._bundle:
            with generators_restored():
                report = self._bundle.run()
            if report is None:
                return []
            assert not isinstance(report, Gathering), "this executor has one worker, so it forms no gang"
            self._events.append(report)
        if not self._events and not self._bundle and timeout:
            time.sleep(timeout)  # other processes may be training for this driver
        events = list(self._events)
        self._events.clear()
        return events

    def clock(self) -> float:
        return time.time()

    def close(self) -> None:
        outcomes.causes = None
        with self._closing:
            if self._bundle is not None:
                self._bundle.close()
            close(self._trainable)
            self._trainable = None
            self._events.clear()
