"""The queue of segments that are to be retrained, one after the other, in a process in which nothing was trained."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.host_memory import HostMemory
from hpstage.checkpoints.store import CheckpointStore
from hpstage.errors import CheckpointError
from hpstage.execution.retraining import Problem, Retrained
from hpstage.execution.untrained import UntrainedFork
from hpstage.execution.verification import MEASURING
from hpstage.plan.facts import ChainId, ForkVerified, NodeId, StateKey, WorkerId
from hpstage.plan.messages import Segment

logger = logging.getLogger("hpstage")

FROM = StateKey("0" * 32)


class Scratch:
    """A temporary folder for the state from which a rerun starts, if no checkpoint contains it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hpstage-rerun-", ignore_cleanup_errors=True)
        self.store = FolderCheckpoints(self._folder.name, "trained again", sweep=False)

    def save(self, state: object, step: int) -> None:
        self.store.save(FROM, state, step=step, parent=None)

    def close(self) -> None:
        self._folder.cleanup()


@dataclass(kw_only=True)
class Rerun:
    """A segment of a chain that is to be retrained.

    ``scratch``: holds the state from which it starts, unless the segment's ``source`` is in the checkpoints.
    ``unreported``: a second segment to retrain afterwards, without the reports on the way, since a trial without
    sharing reports at other steps. It is the same segment, or the chain from its beginning. ``first``: the outcome of
    the current segment's first retraining, if its state or metrics differ, or if it failed.
    """

    chain: ChainId
    node: NodeId
    segment: Segment
    scratch: Scratch | None = None
    unreported: Segment | None = None
    first: Retrained | None = None

    def difference(self, found: Retrained) -> str | None:
        """Describe the difference, given the latest outcome; return ``None`` if nothing that matters differs."""
        first = found if self.first is None else self.first
        begun = "step 0" if self.segment.source is None else f"the state at step {self.segment.start}"
        if (error := _error(first.problem)) and error == _error(found.problem):
            return (
                f"steps {self.segment.start} to {self.segment.stop} were trained once, but cannot be trained again "
                f"from {begun} in a process that had trained nothing, as is needed if a worker is lost: {error}. Keep "
                f"objects that these steps need in an attribute of the trainable that can be pickled, or open them in "
                f"the step that uses them; objects of the process, such as file descriptors, are in no state"
            )
        apart = first.apart
        if apart is None or (apart.what.startswith(_METRICS) and (found.apart is None or found.apart != apart)):
            return None
        if not self.segment.measured:
            return f"measuring changes training: {apart}, with reports at other steps. {MEASURING}"
        return (
            f"training depends on something outside its state: {apart}. First it was trained in a process that had "
            f"trained the steps before, or other trials; then again from {begun} in a process that had trained "
            f"nothing. Run `hpstage check` to find the object that changes. Keep it in an attribute of the trainable, "
            f"attach it, or compute it from the step; change settings of libraries at module level. If training does "
            f"not depend on the object, name it in `stateless`"
        )

    def close(self) -> None:
        if self.scratch is not None:
            self.scratch.close()
            self.scratch = None


@dataclass(eq=False, repr=False)
class RerunQueue:
    """Retrains segments in the order in which they were added. Once closed, it does nothing."""

    untrained: UntrainedFork | None  # a fork made before training; close() ends it
    checkpoints: CheckpointStore
    load: Callable[[StateKey], object]  # returns a state of the store, or one only in memory
    worker: WorkerId
    clock: Callable[[], float]
    seconds: float = 0.0  # total seconds of retraining
    _waiting: deque[Rerun] = field(default_factory=deque)
    _running: Rerun | None = None
    _store: FolderCheckpoints | None = None  # holds the source of the running segment
    _found: ForkVerified | None = None

    @property
    def closed(self) -> bool:
        return self.untrained is None

    @property
    def last(self) -> ChainId | None:
        """The chain of the segment that was added last; ``None`` if all segments are finished."""
        return self._waiting[-1].chain if self._waiting else self._running.chain if self._running else None

    def __len__(self) -> int:
        return len(self._waiting) + (self._running is not None)

    def has_room(self) -> bool:
        """Whether there is memory for two more processes as large as this one, of which one is needed."""
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return (HostMemory().available() or 0) > 2 * resident

    def add(self, rerun: Rerun) -> None:
        if self.closed:
            rerun.close()
        else:
            self._waiting.append(rerun)

    def begin(self) -> None:
        """Start the next queued segment if none is running."""
        if self._running is None:
            try:
                self._begin_next(settled=False)
            except OSError as error:
                self._give_up(error)

    def advance(self, timeout: float = 0.0, *, settled: bool = False) -> ForkVerified | None:
        """Start queued segments, and wait up to ``timeout`` seconds for results. Return a difference that was found,
        each only once.

        Args:
            settled: all states are written, so that a state that cannot be loaded now was evicted.
        """
        deadline = time.perf_counter() + timeout
        try:
            while self._found is None and (self._running or self._begin_next(settled)):
                assert self.untrained is not None, "closing it also drops the running segment"
                result = self.untrained.wait(max(0.0, deadline - time.perf_counter()))
                if result is None:
                    break
                self._see(result)
        except OSError as error:
            self._give_up(error)
        found, self._found = self._found, None
        return found

    def _begin_next(self, settled: bool) -> bool:
        """Start the next segment if its state can be loaded; return whether it was started."""
        while self._waiting and self.untrained is not None:
            rerun = self._waiting[0]
            if self.has_room():
                try:
                    self._store = self._source(rerun)
                    self.untrained.begin(self._store, rerun.segment)
                    self._running = self._waiting.popleft()
                    return True
                except CheckpointError as error:
                    if not settled:
                        return False
                    logger.debug("the steps after %s are not trained again: %s", rerun.segment.source, error)
            self._waiting.popleft().close()
        return False

    def _source(self, rerun: Rerun) -> FolderCheckpoints:
        """Return the store that holds the state from which a segment starts. A state in memory is written to a file."""
        source, kept = rerun.segment.source, self.checkpoints
        if rerun.scratch is None:
            if isinstance(kept, FolderCheckpoints) and (source is None or kept.has(source)):
                return kept
            rerun.scratch = Scratch()
            if source is not None:
                rerun.scratch.store.save(source, self.load(source), step=rerun.segment.start, parent=None)
        return rerun.scratch.store

    def _see(self, result: Retrained) -> None:
        """Process the result of the running segment. Queue it once more, or its variant without reports, if needed."""
        rerun = self._running
        assert rerun is not None and self.untrained is not None and self._store is not None
        self.seconds += result.seconds
        again = False
        if result.equal and rerun.unreported is not None:
            rerun.segment, rerun.unreported, rerun.first = rerun.unreported, None, None
            again = True
        elif (result.apart or result.problem) is not None and rerun.first is None:
            # Repeat it: metrics such as used memory or a process id never repeat, and a failure may be temporary.
            rerun.first = result
            again = True
        if again:
            self.untrained.begin(self._store, rerun.segment)
            return
        self._running = None
        rerun.close()
        if result.problem is not None and result.problem.kind == "unreadable":
            logger.debug("the end of a chain was not trained again: %s", result.problem.text)  # the state was evicted
            return
        difference = rerun.difference(result)
        if difference is not None:
            self._found = ForkVerified(
                chain=rerun.chain,
                worker=self.worker,
                node=rerun.node,
                step=rerun.segment.start,
                steps=rerun.segment.stop - rerun.segment.start,
                seconds=result.seconds,
                at=self.clock(),
                difference=difference,
            )
        elif result.problem is not None:
            logger.warning(
                "Steps %d to %d could not be trained again in a process that had trained nothing, as is needed if a "
                "worker is lost: %s",
                rerun.segment.start,
                rerun.segment.stop,
                result.problem.text,
            )

    def _give_up(self, error: OSError) -> None:
        logger.debug("nothing more is trained again: %s", error)
        self.close()

    def close(self) -> None:
        """End the fork and its training. Idempotent."""
        for rerun in (*self._waiting, *([self._running] if self._running else ())):
            rerun.close()
        self._waiting.clear()
        self._running = None
        if self.untrained is not None:
            self.untrained.close()
            self.untrained = None


_METRICS = "the metric ", "state['metrics']"
_MEMORY = "MemoryError", "OutOfMemoryError", "allocate memory"


def _error(problem: Problem | None) -> str:
    """Return the last line of a traceback; an empty string for another problem, or if memory has run out, since the
    first training still uses memory as well."""
    if problem is None or problem.kind != "failed":
        return ""
    line = problem.text.splitlines()[-1]
    return "" if any(words in line for words in _MEMORY) else line
