"""Retrains parts of a chain from one of its states, in a process in which nothing was trained.

Anything that training keeps outside its states (in a library, in a C object, in the process) is missing there, or is as
it was before the first step. If the results depend on it, they differ; hpstage need not know what it is. Two parts of
chains are retrained: the ends of chains, which reveal what earlier trials left behind, and the steps after states that
are saved on the way, from which later chains start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from hpstage.checkpoints.state_tree import digest
from hpstage.checkpoints.store import CheckpointStore
from hpstage.errors import CheckpointError
from hpstage.execution.flight import Flight
from hpstage.execution.rerun_queue import FROM, Rerun, RerunQueue, Scratch
from hpstage.execution.untrained import UntrainedFork
from hpstage.plan.facts import ForkVerified, Metrics, StateKey, WorkerId
from hpstage.plan.messages import Boundary, Compared, Segment, Stage
from hpstage.trainable import Trainable
from hpstage.training.capture.portrait import state_texts

_CHAINS = 1, 2, 4
"""The first, second and fourth chain of a process are always retrained, and the second one that starts from scratch. If
one of them has a gang, the next chain is retrained instead. The first chain is retrained from a state within it. Later
ones follow other chains, so they are retrained from their beginning."""
_SECONDS, _SHARE = 0.15, 0.01
"""Maximum time for retraining: seconds, plus a share of the seconds since the first chain."""
_WAITING_FORKS = 2
"""Maximum number of queued reruns from saved states on the way, for which the end of a chain has to wait."""
_WAITING = 1 / 8
"""A step's duration is the processor time of its thread, which does not depend on the machine's load. At least this
share of the elapsed time counts, since a step may wait for data."""
_PATIENCE = 10.0
"""Training waits at the end of a chain for its retraining: as long as the chain took, plus this many seconds, so that
short searches are covered."""
_LONGEST = 60.0
"""Steps that take longer than this many seconds are not retrained."""
_TO = StateKey("1" * 32)


class Reruns:
    """Retrains parts of the chains of one trainable. Once closed, it does nothing.

    Args:
        untrained: a fork of this process that was made before training; it is closed with this object.
        checkpoints: the checkpoint store.
        load: returns a state of the store, or a state that is only in memory.
    """

    def __init__(
        self,
        trainable: Trainable,
        untrained: UntrainedFork,
        checkpoints: CheckpointStore,
        load: Callable[[StateKey], object],
        worker: WorkerId,
        clock: Callable[[], float],
    ) -> None:
        self._trainable = trainable
        self._queue = RerunQueue(untrained, checkpoints, load, worker, clock)
        self._chains = self._from_nothing = self._followed = 0
        self._began = self._chain_began = time.perf_counter()
        self._spent = 0.0  # seconds that training waited while its states were copied and hashed
        self._flight: Flight | None = None  # the chain that is followed
        self._waits = False  # whether its end waits for its retraining
        self._seen: int | None = None  # its last step that was seen
        self._clocks = 0.0, 0.0  # at that step: elapsed time, and the thread's processor time
        self._least = math.inf  # seconds of its shortest step
        self._reported: list[int] = []  # steps after which training was to report
        self._fork: Boundary | None = None  # last boundary with a saved state whose next steps are not queued yet
        self._taken: int | None = None  # step at which a state of the chain was taken
        self._scratch: Scratch | None = None  # holds that state

    def follow(self, flight: Flight) -> None:
        """Record that a chain starts from its source."""
        self._leave()
        if self._queue.closed:
            return
        self._chains += 1
        from_nothing = flight.chain.source is None
        self._from_nothing += from_nothing
        due = self._followed < sum(chain <= self._chains for chain in _CHAINS)
        wanted = due or (from_nothing and self._from_nothing == 2)
        if not flight.chain.verify_new:
            self.close()
        elif (wanted or (self._has_time() and not self._queue)) and not flight.chain.gang:
            if not self._queue.has_room():
                self.close()  # the fork takes memory, too
                return
            self._followed += due
            self._flight, self._waits, self._seen, self._least = flight, wanted, None, math.inf
            self._reported.clear()
            self._chain_began = time.perf_counter()

    def _leave(self) -> None:
        """Stop following the chain. If it has not reached its end, drop the state that was taken."""
        self._flight = self._fork = self._taken = None
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    def see(self, flight: Flight, boundary: Boundary | None) -> None:
        """Record that the chain has reached its current step, with this boundary, and continues."""
        if self._flight is not flight or flight.step == self._seen:  # seen before, as where a stage begins
            return
        self._seen = flight.step
        if flight.announced and hasattr(self._trainable, "announce"):
            self._reported.append(flight.step)
        last, self._clocks = self._clocks, (time.perf_counter(), time.thread_time())
        if flight.step - flight.chain.stages[0].start >= 2:  # the first step takes longer than others
            passed, computed = (now - then for now, then in zip(self._clocks, last, strict=True))
            self._least = min(self._least, max(computed, passed * _WAITING))
            if self._least > _LONGEST:
                self._leave()
                return
            if self._taken is None and flight.step >= self._start(flight):
                self._take(flight.step)
        self._see_fork(flight, boundary)

    def _start(self, flight: Flight) -> int:
        """Return the step at which to take a state, as far as it is known now; the last step means no state."""
        begin = flight.chain.stages[0].start
        end = flight.course.end or max(flight.course.boundaries, default=flight.step)
        if self._chains == 1:
            return end - min(self._most(), (end - begin + 1) // 2)
        return end if end - begin <= self._most() else end - self._most()

    @property
    def _allowed(self) -> float:
        """The maximum seconds of retraining so far."""
        return _SECONDS + _SHARE * (time.perf_counter() - self._began)

    def _has_time(self) -> bool:
        return self._spent + self._queue.seconds < self._allowed

    def _most(self) -> int:
        """Estimate how many steps may be retrained."""
        return max(2, int(self._allowed / max(self._least, 1e-9)))

    def _take(self, step: int) -> None:
        began = time.perf_counter()
        try:
            self._scratch = Scratch()
            self._scratch.save(self._trainable.state_dict(), step)
            self._taken = step
        except (CheckpointError, OSError):
            self.close()
        self._spent += time.perf_counter() - began

    def _see_fork(self, flight: Flight, boundary: Boundary | None) -> None:
        """Queue the steps since the last saved state for retraining, if there are enough; note the next such state."""
        kept = boundary is not None and boundary.keep
        fork = self._fork
        if fork is not None and (kept or flight.step - fork.step >= self._most()):
            self._fork = None
            flight.stop_clock()
            self._add(flight, None, fork=fork)
            flight.start_clock()
        is_source = flight.step == flight.chain.stages[0].start
        if boundary is not None and kept and not is_source and len(self._queue) < _WAITING_FORKS and self._has_time():
            self._fork = boundary

    def begin(self, flight: Flight, metrics: Metrics | None) -> None:
        """Start retraining the end of the chain, if it is one of the chains to retrain.

        Args:
            metrics: the metrics at its current step, which is its last.
        """
        if self._flight is not flight:
            return
        self._flight = None
        if not self._queue.closed:
            self._add(flight, metrics, fork=self._fork, at_end=True)
        self._leave()

    def _add(self, flight: Flight, metrics: Metrics | None, *, fork: Boundary | None, at_end: bool = False) -> None:
        """Queue steps for retraining: those since a fork, and at the end of a chain those since the state taken on its
        way."""
        began = time.perf_counter()
        begin = flight.chain.stages[0].start
        within = at_end and flight.step - begin <= self._most()  # retrain all of its steps
        if within and self._chains > 1:
            self._taken = None  # only a single slow step was the reason to take it
        start = begin if within and self._taken is None else self._taken
        if not at_end or start == flight.step:
            start = None
        if fork is not None or start is not None:
            state = self._trainable.state_dict()
            texts = dict(state_texts("state", state))
            segment = Segment(
                initial=flight.chain.initial,
                stages=(),
                stop=flight.step,
                compared=(Compared(flight.step, _TO, digest(state), texts=texts, reported=flight.announced),),
                metrics={} if metrics is None else {flight.step: metrics},
                numerics=flight.chain.numerics,
            )
            del state
            if fork is not None and fork.step < flight.step:
                segment = self._part(flight, segment, fork.step, fork.key)
                self._queue.add(Rerun(chain=flight.chain.id, node=flight.stage.node, segment=segment))
            if start is not None:
                self._queue.add(self._of_end(flight, segment, start, within))
            self._queue.begin()
        passed = time.perf_counter() - began
        self._spent += passed
        flight.load_seconds += passed

    def _of_end(self, flight: Flight, segment: Segment, start: int, within: bool) -> Rerun:
        begin, own, taken = flight.chain.stages[0].start, flight.chain.source, self._taken is not None
        segment = self._part(flight, segment, start, FROM if taken else own)
        unreported = replace(segment, reported=(), measured=False)
        if within and own is None:
            unreported = replace(unreported, source=None, stages=_between(flight.course.stages, begin, flight.step))
        wanted = any(step > unreported.start for step in self._reported)
        scratch = None
        if taken:
            scratch, self._scratch = self._scratch, None
        return Rerun(
            chain=flight.chain.id,
            node=flight.stage.node,
            segment=segment,
            scratch=scratch,
            unreported=unreported if wanted else None,
        )

    def _part(self, flight: Flight, segment: Segment, start: int, source: StateKey | None) -> Segment:
        return replace(
            segment,
            source=source,
            stages=_between(flight.course.stages, start, segment.stop),
            reported=tuple(step for step in self._reported if step > start),
        )

    def ended(self, flight: Flight, *, at_end: bool) -> ForkVerified | None:
        """Return the difference that retraining has found, if retraining has finished. At the end of a chain, wait for
        its own retraining for a while."""
        if not self._queue:
            return None
        began = time.perf_counter()
        own = at_end and self._waits and self._queue.last == flight.chain.id
        found = self._queue.advance(_PATIENCE + began - self._chain_began if own else 0.0, settled=at_end)
        flight.load_seconds += time.perf_counter() - began
        return None if found is None else replace(found, chain=flight.chain.id)  # an ended one's report is ignored

    def close(self) -> None:
        """End the fork and its training. Idempotent."""
        self._leave()
        self._queue.close()


def _between(stages: Sequence[Stage], start: int, stop: int) -> tuple[Stage, ...]:
    return tuple(
        replace(stage, start=max(stage.start, start), stop=min(stage.stop, stop), verify=False)
        for stage in stages
        if stage.start < stop and stage.stop > start
    )
