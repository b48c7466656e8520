"""Training the end of a chain again in a process in which nothing was trained, from a state of the chain.

What training keeps outside the states (in a library, in an object of C, in the process) is missing there, or as it was
before the first step. Whatever it is, the results differ if they depend on it: nothing has to be known of it.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.host_memory import HostMemory
from hpstage.checkpoints.state_tree import digest
from hpstage.checkpoints.store import CheckpointStore
from hpstage.errors import CheckpointError
from hpstage.execution.flight import Flight
from hpstage.execution.retraining import Compared, Problem, Retrained, Segment
from hpstage.execution.untrained import UntrainedFork
from hpstage.execution.verification import MEASURING
from hpstage.plan.facts import ChainId, ForkVerified, Metrics, NodeId, StateKey, WorkerId
from hpstage.plan.messages import Stage
from hpstage.trainable import Trainable
from hpstage.training.capture.portrait import state_texts

logger = logging.getLogger("hpstage")

_CHAINS = 1, 2, 4
"""Which chains of a process, besides the second one that begins with nothing; where another one is being trained again
then, the next. The first is compared with training from a state within it. Later ones train after others, so they are
compared from their beginning."""
_LAST = 16
"""The last chain of a process that may be the second one that begins with nothing."""
_SECONDS, _SHARE = 0.15, 0.01
"""What the steps that are trained again may take, in seconds and of the seconds since the first."""
_WAITING = 1 / 8
"""What a step takes is what its thread computes, which a loaded machine makes no longer, but at least this share of the
time that has passed: a step may wait for data."""
_PATIENCE = 10.0
"""Seconds for which training waits besides those of the chain, so that short searches are covered."""
_LONGEST = 60.0
"""Seconds of the longest steps that are trained again."""
_FROM, _TO = StateKey("0" * 32), StateKey("1" * 32)


class Reruns:
    """Trains chains of one trainable again. Closed, it does nothing.

    Args:
        untrained: a fork of this process from before training, which this closes.
        checkpoints: the checkpoint store.
        load: returns one of them, or one that is kept in memory only.
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
        self._untrained: UntrainedFork | None = untrained
        self._checkpoints = checkpoints
        self._load = load
        self._worker = worker
        self._clock = clock
        self._chains = self._from_nothing = self._followed = 0
        self._began = self._chain_began = time.perf_counter()
        self._flight: Flight | None = None  # the chain that is followed
        self._seen: int | None = None  # its last step that was seen
        self._clocks = 0.0, 0.0  # of that step: the time, and what the thread has computed
        self._least = math.inf  # seconds of its shortest step
        self._reported: list[int] = []  # steps after which training was to report
        self._taken: int | None = None  # where a state of it was taken
        self._running: _Rerun | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the states of one rerun

    def follow(self, flight: Flight) -> None:
        """Note that a chain begins, from its source."""
        self._flight = None
        if self._untrained is None:
            return
        if self._running is None:
            self._discard()  # a chain that has not come to its end may have left a state
        self._chains += 1
        from_nothing = flight.chain.source is None
        self._from_nothing += from_nothing
        due = self._followed < sum(chain <= self._chains for chain in _CHAINS) and self._chains <= _LAST
        second = from_nothing and self._from_nothing == 2
        done = self._chains > (_CHAINS[-1] if self._from_nothing >= 2 else _LAST) and not (due or second)
        if not flight.chain.verify_new or (done and self._running is None):
            self.close()
        elif (due or second) and self._running is None and not flight.chain.gang:
            if not _has_room():
                self.close()  # it takes memory, too
                return
            self._followed += due
            self._flight, self._seen, self._taken, self._least = flight, None, None, math.inf
            self._reported.clear()
            self._chain_began = time.perf_counter()

    def see(self, flight: Flight) -> None:
        """Note that the chain has come to its step and trains on."""
        if self._flight is not flight or flight.step == self._seen:  # again, where a stage begins
            return
        self._seen = flight.step
        if flight.announced and hasattr(self._trainable, "announce"):
            self._reported.append(flight.step)
        last, self._clocks = self._clocks, (time.perf_counter(), time.thread_time())
        if flight.step - flight.chain.stages[0].start < 2 or self._taken is not None:
            return  # the first step takes longer than others
        passed, computed = (now - then for now, then in zip(self._clocks, last, strict=True))
        self._least = min(self._least, max(computed, passed * _WAITING))
        if self._least > _LONGEST:
            self._flight = None
        elif flight.step >= self._start(flight):
            self._take(flight.step)

    def _start(self, flight: Flight) -> int:
        """Return the step at which a state is to be taken, as far as is known now; the last one: nowhere."""
        begin = flight.chain.stages[0].start
        end = flight.course.end or max(flight.course.boundaries, default=flight.step)
        if self._chains == 1:
            return end - min(self._most(), (end - begin + 1) // 2)
        return end if end - begin <= self._most() else end - self._most()

    def _most(self) -> int:
        """Return how many steps may be trained again, as far as is known now."""
        allowed = _SECONDS + _SHARE * (time.perf_counter() - self._began)
        return max(2, int(allowed / max(self._least, 1e-9)))

    def _take(self, step: int) -> None:
        try:
            self._scratch().save(_FROM, self._trainable.state_dict(), step=step, parent=None)
            self._taken = step
        except (CheckpointError, OSError) as error:
            self._give_up(str(error))

    def begin(self, flight: Flight, metrics: Metrics | None) -> None:
        """Begin to train the end of the chain again, if it is one of those.

        Args:
            metrics: those at its present step, its last.
        """
        if self._flight is not flight or self._untrained is None:
            return
        self._flight = None
        begin = flight.chain.stages[0].start
        within = flight.step - begin <= self._most()
        if within and self._chains > 1:
            self._taken = None  # it was taken because of a step that took long
            self._discard()
        start = begin if self._taken is None else self._taken
        if not start < flight.step or (self._taken is None and not within) or not _has_room():
            return
        began = time.perf_counter()
        try:
            store, source = self._source(flight, start)
            state = self._trainable.state_dict()
            reached = Compared(flight.step, _TO, digest(state), texts=dict(state_texts("state", state)))
            segment = Segment(
                initial=flight.chain.initial,
                stages=_between(flight.course.stages, start, flight.step),
                stop=flight.step,
                source=source,
                compared=(reached,),
                metrics={} if metrics is None else {flight.step: metrics},
                reported=tuple(step for step in self._reported if step > start),
                numerics=flight.chain.numerics,
            )
            unreported = replace(segment, reported=(), measured=False)
            if within and flight.chain.source is None:
                unreported = replace(unreported, source=None, stages=_between(flight.course.stages, begin, flight.step))
            without = unreported if any(step > unreported.start for step in self._reported) else None
            self._running = _Rerun(flight.chain.id, flight.stage.node, store, segment, without)
            self._untrained.begin(store, segment)
        except (CheckpointError, OSError) as error:
            self._give_up(str(error))
        flight.load_seconds += time.perf_counter() - began

    def _source(self, flight: Flight, start: int) -> tuple[FolderCheckpoints, StateKey | None]:
        """Return the state to begin with, ``None`` for none, and where it is."""
        own, kept = flight.chain.source, self._checkpoints
        if self._taken is not None or own is None:
            return self._scratch(), None if self._taken is None else _FROM
        if isinstance(kept, FolderCheckpoints) and kept.has(own):
            return kept, own
        store = self._scratch()
        store.save(_FROM, self._load(own), step=start, parent=None)
        return store, _FROM

    def ended(self, flight: Flight, *, at_end: bool) -> ForkVerified | None:
        """Return the difference that was found by training again, if that has ended; the end of a chain waits for its
        own for a while."""
        running, began = self._running, time.perf_counter()
        own = at_end and running is not None and running.chain == flight.chain.id
        differs = self._ended(_PATIENCE + began - self._chain_began if own else 0.0)
        flight.load_seconds += time.perf_counter() - began
        return differs

    def _ended(self, timeout: float) -> ForkVerified | None:
        """Return the difference that was found by training again, if that has ended by then."""
        running, untrained = self._running, self._untrained
        if running is None or untrained is None:
            return None
        try:
            found = untrained.wait(timeout)
            if found is not None and found.equal and running.unreported is not None:
                running.segment, running.unreported, running.first = running.unreported, None, None
                untrained.begin(running.store, running.segment)
                found = untrained.wait(timeout)
            if found is not None and (found.apart or found.problem) is not None and running.first is None:
                # Once more: metrics such as the memory used or a process id are never the same, and a failure may pass.
                running.first = found
                untrained.begin(running.store, running.segment)
                found = untrained.wait(timeout)
        except (ChildProcessError, OSError) as error:
            self._give_up(str(error))
            return None
        if found is None:
            return None
        self._running = None
        self._discard()
        if found.problem is not None and found.problem.kind == "unreadable":
            logger.debug("the end of a chain was not trained again: %s", found.problem.text)  # evicted before
            return None
        difference = running.difference(found)
        if difference is None:
            if found.problem is not None:
                _warn(found.problem, running.segment)
            return None
        return ForkVerified(
            chain=running.chain,
            worker=self._worker,
            node=running.node,
            step=running.segment.start,
            steps=running.segment.stop - running.segment.start,
            seconds=found.seconds,
            at=self._clock(),
            difference=difference,
        )

    def _give_up(self, why: str) -> None:
        logger.debug("the end of a chain is not trained again: %s", why)
        self.close()

    def _scratch(self) -> FolderCheckpoints:
        """Return a store for the state that one rerun begins with."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="hpstage-rerun-", ignore_cleanup_errors=True)
        return FolderCheckpoints(self._folder.name, "trained again", sweep=False)

    def _discard(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def close(self) -> None:
        """End the fork, with what it trains. Idempotent."""
        self._flight = self._running = None
        self._discard()
        if self._untrained is not None:
            self._untrained.close()
            self._untrained = None


@dataclass
class _Rerun:
    """The end of a chain that is trained again.

    ``unreported``: what follows, the same, or the chain from its beginning, without the reports on the way, since a
    trial alone has others. ``first``: what the present segment led to, if that was another state or metric, or a
    failure.
    """

    chain: ChainId
    node: NodeId
    store: FolderCheckpoints
    segment: Segment
    unreported: Segment | None
    first: Retrained | None = None

    def difference(self, found: Retrained) -> str | None:
        """Describe what differs, given what training has led to now; ``None``: nothing that matters."""
        first = found if self.first is None else self.first
        begun = "step 0" if self.segment.source is None else f"the state at step {self.segment.start}"
        if (error := _error(first.problem)) and error == _error(found.problem):
            return (
                f"steps {self.segment.start} to {self.segment.stop}, which were trained before, cannot be trained "
                f"again from {begun} in a process that had trained nothing, as they would be if a worker were lost: "
                f"{error}. "
                f"Make what they need an attribute of the trainable that can be pickled, or open it in the step that "
                f"uses it; what belongs to the process, such as a file descriptor, is in no state"
            )
        apart = first.apart
        if apart is None or (apart.what.startswith(_METRICS) and (found.apart is None or found.apart != apart)):
            return None
        if not self.segment.measured:
            return f"measuring changes training: {apart}, with reports at other steps before. {MEASURING}"
        return (
            f"training depends on something outside its state: {apart}. First it was trained in a process that had "
            f"trained the steps before, or other trials; then again from {begun} in a process that had trained "
            f"nothing. Make what changes an attribute of the trainable or attach it, or a function of the step; a "
            f"setting of a library belongs at module level. If training does not depend on it, name it in "
            f"`stateless`; `hpstage check` looks for it"
        )


_METRICS = "the metric ", "state['metrics']"
_MEMORY = "MemoryError", "OutOfMemoryError", "allocate memory"


def _error(problem: Problem | None) -> str:
    """Return the last line of a traceback, unless memory has run out: that of the first training is in use as well."""
    if problem is None or problem.kind != "failed":
        return ""
    line = problem.text.splitlines()[-1]
    return "" if any(words in line for words in _MEMORY) else line


def _between(stages: Sequence[Stage], start: int, stop: int) -> tuple[Stage, ...]:
    return tuple(
        replace(stage, start=max(stage.start, start), stop=min(stage.stop, stop), verify=False)
        for stage in stages
        if stage.start < stop and stage.stop > start
    )


def _warn(problem: Problem, segment: Segment) -> None:
    logger.warning(
        "Steps %d to %d could not be trained again in a process that had trained nothing, as they would be if a "
        "worker were lost: %s",
        segment.start,
        segment.stop,
        problem.text,
    )


def _has_room() -> bool:
    """Whether memory has room for another process that trains the same: not the last of what there is."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return (HostMemory().available() or 0) > 2 * resident
