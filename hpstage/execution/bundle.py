"""Chains that are trained side by side in one process: a bundle."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from hpstage.checkpoints.live import LiveCache
from hpstage.checkpoints.store import CheckpointStore
from hpstage.errors import InternalError
from hpstage.errors.deprecation import deprecated
from hpstage.execution.control import Control
from hpstage.execution.fetching import Fetcher
from hpstage.execution.flight import Due, Gathering, Took
from hpstage.execution.runner import ChainRunner, Running
from hpstage.execution.saving import Writer
from hpstage.execution.untrained import UntrainedFork
from hpstage.execution.widening import Widening
from hpstage.plan.facts import NO_FROZEN_WORK, ChainId, StateKey, WorkerId
from hpstage.plan.messages import Chain, ChainEnded, ChainReport, StepsMeasured, names_of
from hpstage.schedule import Scalar
from hpstage.trainable import Trainable, is_bundling
from hpstage.training.identity.inputs import inputs_of


def slots_in(trainable: object) -> int:
    """Return the maximum number of chains that a process trains side by side."""
    if not is_bundling(trainable):
        return 1
    if hasattr(trainable, "slots"):
        return trainable.slots
    deprecated(f"{type(trainable).__name__}.lanes", "slots")
    return trainable.lanes  # type: ignore[attr-defined, no-any-return]


class Bundle:
    """Runs chains side by side, each in its own slot. Chains join and leave at any time, and synchronize at each step.

    Args:
        trainable: the trainable. It has a single slot, unless it is :class:`~hpstage.trainable.Bundling`.
        worker: the worker's name in reports.
        host: address at which other workers reach this one's host.
        on_report: receives, in another thread, reports that had to wait until a state was written. If given, states are
            written while training continues, if the store allows that. Otherwise training waits for each state.
        untrained: a fork of this process that was made before training; used only if there is a single slot.
    """

    def __init__(
        self,
        trainable: Trainable,
        checkpoints: CheckpointStore,
        live: LiveCache,
        *,
        worker: WorkerId,
        clock: Callable[[], float] = time.time,
        host: str = "127.0.0.1",
        on_report: Callable[[ChainReport], object] | None = None,
        untrained: UntrainedFork | None = None,
    ) -> None:
        self._fetcher = Fetcher(checkpoints, live)
        writer = None if on_report is None or not checkpoints.beside_training else Writer(on_report)
        self._bundling = trainable if is_bundling(trainable) else None
        self._widening = Widening(slots_in(trainable))
        self._worker, self._clock = worker, clock
        self._inputs = inputs_of(trainable)
        members = trainable.members() if is_bundling(trainable) else [trainable]
        self._runners = {
            slot: ChainRunner(
                member,
                checkpoints,
                live,
                self._fetcher.get,
                worker=slot,
                clock=clock,
                bundled=self._bundling is not None,
                host=host,
                inputs=self._inputs,
                writer=writer,
                untrained=None if self._bundling is not None else untrained,
            )
            for slot, member in zip(names_of(worker, slots_in(trainable)), members, strict=True)
        }
        self._slots = list(self._runners)
        self._members = dict(zip(self._slots, members, strict=True))
        self._running: dict[WorkerId, tuple[Chain, Running, Control]] = {}
        self._due: dict[WorkerId, Due] = {}
        self._took: dict[WorkerId, Took] = {}  # of the last step, not passed to the chains yet

    def __bool__(self) -> bool:
        """Whether any chain is running."""
        return bool(self._running)

    def start(self, worker: WorkerId, chain: Chain, control: Control) -> None:
        if worker in self._running or worker not in self._runners:
            raise InternalError(f"{chain.id} was started on {worker}, which is not an idle worker here")
        self._widening.learn(chain.step_times)
        self._running[worker] = chain, self._runners[worker].run(chain, control), control

    def control(self, chain: ChainId) -> Control | None:
        """Return the control of a running chain."""
        return next((control for its, _, control in self._running.values() if its.id == chain), None)

    def expect(self, keys: Sequence[StateKey]) -> None:
        """Fetch these states while training continues, soonest first, since chains are expected to start from them. May
        be called by any thread."""
        self._fetcher.expect(keys)

    def pause(self) -> None:
        """Make :meth:`run` return at the next step. May be called from a signal handler."""
        for _, _, control in list(self._running.values()):
            control.pause()

    def run(self) -> ChainReport | Gathering | None:
        """Train until a chain reports, or waits for its gang, and return the report; ``None`` at a pause."""
        while True:
            for worker in [worker for worker in self._running if worker not in self._due]:
                report = self._running[worker][1].send(self._took.pop(worker, None))
                if isinstance(report, Due):
                    self._due[worker] = report
                    continue
                if isinstance(report, ChainEnded):
                    del self._running[worker]
                return report
            due, self._due = self._due, {}
            if self._train(due):
                chain = next(iter(self._running.values()))[0].id
                return StepsMeasured(chain, self._worker, self._widening.times.seconds, self._clock())

    def _train(self, due: Mapping[WorkerId, Due]) -> bool:
        """Train a step of each chain. Return whether a new duration of stacked steps is known."""
        bundling, widening = self._bundling, self._widening
        assert bundling is not None, "without a bundling trainable, a chain trains its steps itself"
        worthwhile = getattr(bundling, "worthwhile", len(self._slots))
        width = widening.width([self._running[worker][0].id for worker in due], worthwhile)
        measures = widening.measures
        start = bundling.seconds() if measures else 0.0
        began = time.perf_counter()
        with self._inputs:
            as_one = bundling.train_together(
                {self._slots.index(worker): (one.step, one.values) for worker, one in due.items()}, width
            )
        whole = time.perf_counter() - began
        widths = {worker: as_one[self._slots.index(worker)] for worker in due}
        self._took = self._shared(whole, widths)
        return measures and widening.took(bundling.seconds() - start, [*widths.values()])

    def _shared(self, whole: float, widths: Mapping[WorkerId, int]) -> dict[WorkerId, Took]:
        """Divide the seconds of a step among the chains that were trained.

        Args:
            widths: for each chain, the number of chains with which it was stacked, itself included.
        """
        times = self._widening.times
        # The measured seconds of earlier steps give the proportions; the seconds of this step differ.
        measured = {worker: times.of(width) / width for worker, width in widths.items()}
        scale = whole / sum(measured.values())
        alone = scale * times.of(1)
        return {
            worker: Took(scale * its, whole, alone, getattr(self._members[worker], "frozen_work", NO_FROZEN_WORK))
            for worker, its in measured.items()
        }

    def follow(self, chain: Chain, address: str, rank: int) -> None:
        """Follow the leader of a chain; see :meth:`ChainRunner.follow`. Nothing else may be running in this process."""
        if self._running:
            raise InternalError(f"{chain.id} is to be followed by a worker that trains other chains")
        self._runners[self._slots[0]].follow(chain, address, rank)

    def try_out(self, initial: Mapping[str, Scalar]) -> dict[str, float] | None:
        return self._runners[self._slots[0]].try_out(initial)

    def close(self) -> list[ChainId]:
        """End all chains at their current steps, and return them."""
        for _, running, _ in self._running.values():
            running.close()
        ended = [chain.id for chain, _, _ in self._running.values()]
        self._running.clear()
        self._due.clear()
        for runner in self._runners.values():
            runner.close()
        return ended
