"""Asynchronous saving: training waits only while a state is copied, and continues while it is written.

A report about a state, and every later report of its chain, is delivered only once the state is durable, since the
receiver may fork the state, or delete an older one.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from hpstage.checkpoints.live import LiveCache
from hpstage.checkpoints.patient_store import PatientStore
from hpstage.checkpoints.state_tree import flatten
from hpstage.execution.control import Control
from hpstage.plan.facts import Kept, StateKey, StateReached
from hpstage.plan.messages import BoundaryReached, ChainReport

logger = logging.getLogger("hpstage")

# Maximum number and bytes of states that a process has copied but not written yet; training waits before it copies
# more. A single state may be larger.
_STATES, _BYTES = 2, 1 << 30
# States of fewer bytes are written by the training thread: another thread would hold Python's lock for just as long.
_SMALL = 100_000
# Seconds after which an idle writer thread ends. Starting one takes longer than copying a small state.
_IDLE = 5.0


@dataclass(slots=True, eq=False)
class Save:
    """A state that is being written."""

    key: StateKey
    state: object
    nbytes: int
    step: int
    parent: StateKey | None
    wait: Callable[[], object] | None = None  # returns once ``state`` is complete, if it is still being copied
    kept: Kept | None = None  # describes it once it is durable


class Writer:
    """Writes the states of a process one after the other, in a thread that ends when there are none for a while.

    Args:
        on_report: receives each report that had to wait; called in the writer's thread, never concurrently.
    """

    def __init__(self, on_report: Callable[[ChainReport], object]) -> None:
        self.on_report = on_report
        self.changed = threading.Condition()
        self._queue: deque[tuple[Saves, Save]] = deque()
        self._nbytes = 0
        self._thread: threading.Thread | None = None
        self._ends = False

    def has_room(self, size: int) -> bool:
        return not self._queue or (len(self._queue) < _STATES and self._nbytes + size <= _BYTES)

    def is_idle(self) -> bool:
        return not self._queue

    def begin(self, saves: Saves, save: Save) -> None:
        """Write a state of a chain after those begun before. Call it with ``changed`` held."""
        self._queue.append((saves, save))
        self._nbytes += save.nbytes
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hpstage-saves", daemon=True)
            self._thread.start()
            atexit.register(self._end)  # a thread that is in torch's code when Python ends would abort the process
        self.changed.notify_all()

    def _run(self) -> None:
        while True:
            with self.changed:
                if not self.changed.wait_for(lambda: bool(self._queue) or self._ends, _IDLE) or not self._queue:
                    self._thread = None
                    if not self._ends:
                        atexit.unregister(self._end)
                    return
            self._write(*self._queue[0])

    def _end(self) -> None:
        """End the thread after it has written all queued states."""
        with self.changed:
            self._ends, thread = True, self._thread
            self.changed.notify_all()
        if thread is not None:
            thread.join()

    def _write(self, saves: Saves, save: Save) -> None:
        saves.write(save)
        with self.changed:
            self._queue.popleft()
            self._nbytes -= save.nbytes
            saves.deliver()
            self.changed.notify_all()
        saves.prepare(save)


class Saves:
    """The states of a running chain that are being written, and the chain's reports, which wait for them.

    Args:
        checkpoints: used in the writer's thread, too, while a state is being written.
        live: keeps the copies that are written.
        control: control of the chain. An unreachable store is not waited for once the chain is to stop, or is to pause
            while training waits for the store.
        writer: ``None`` to write each state at once, in the training thread.
    """

    def __init__(self, checkpoints: PatientStore, live: LiveCache, control: Control, writer: Writer | None) -> None:
        self.error: Exception | None = None
        """The error of a state that could not be written. No state is written after it, and no report is delivered."""
        self._checkpoints = checkpoints
        self._live = live
        self._control = control
        self._writer = writer
        self._changed = threading.Condition() if writer is None else writer.changed
        self._held: deque[tuple[ChainReport, Save | None]] = deque()
        self._waiting = False  # whether training waits for a state to be written
        self._settling_since: float | None = None
        self._closed = False

    def save(self, key: StateKey, state: object, *, step: int, parent: StateKey | None) -> Save:
        """Copy a state and queue it for writing; if memory has no room for a copy, write it at once. Waits while the
        queue is full. Raises :class:`StateError`, or the error of an earlier state."""
        flat = flatten(state)
        size = flat.nbytes
        writer = self._writer
        if writer is not None and not (has_room := self._live.has_room(size)):
            with self._changed:
                self._await(writer.is_idle)
            self._live.relieve()
        if writer is None or not has_room or (size < _SMALL and not self._held):
            done = Save(key, None, size, step, parent)
            done.kept = self._checkpoints.save(key, state, step=step, parent=parent)
            self._live.put(key, state)
            return done
        with self._changed:
            self._await(lambda: writer.has_room(size))
        copy, wait = self._live.copy(key, flat, size)
        save = Save(key, copy, size, step, parent, wait)
        with self._changed:
            writer.begin(self, save)
        return save

    def give(self, report: ChainReport, save: Save | None = None) -> Iterator[ChainReport]:
        """Yield a report, unless it has to wait for an earlier report, or for ``save``, which writes its state."""
        with self._changed:
            if self._held or (save is not None and save.kept is None):
                self._held.append((report, save))
                return
        yield _completed(report, save)

    def settle(self) -> None:
        """Wait until every report is delivered. Raises the error of a state that could not be written."""
        with self._changed:
            self._settling_since = time.perf_counter()
            try:
                self._await(lambda: not self._held)
            finally:
                self._settling_since = None

    def close(self) -> None:
        """Stop delivering reports."""
        with self._changed:
            self._closed = True
            self._held.clear()

    def withheld(self) -> list[StateReached]:
        """Return the states that were reached, but will not be reported because of an error."""
        return [report.reached for report, _ in self._held if isinstance(report, BoundaryReached)]

    def write(self, save: Save) -> None:
        """Write a state, unless an earlier one has failed. Called in the writer's thread."""
        if self.error is not None or self._closed:
            return
        try:
            if save.wait is not None:
                save.wait()
            save.kept = self._checkpoints.save(
                save.key, save.state, step=save.step, parent=save.parent, giving_up=self._gives_up
            )
        except Exception as error:  # raised in the training thread
            self.error = error
            return

    def prepare(self, save: Save) -> None:
        """Allocate memory for the next state, if there is any, so that training only has to fill it. Called in the
        writer's thread."""
        state, save.state = save.state, None
        if self.error is None and not self._closed and save.wait is None:
            try:
                self._live.prepare(state, save.nbytes)
            except Exception:  # an error would end the thread, with states in its queue
                logger.debug("no memory could be made for the next state", exc_info=True)

    def deliver(self) -> None:
        """Deliver the reports whose states are written. Called in the writer's thread, with ``changed`` held."""
        assert self._writer is not None
        while self._held and self.error is None:
            report, save = self._held[0]
            if save is not None and save.kept is None:
                return
            report = _completed(report, save)
            if len(self._held) == 1 and self._settling_since is not None and isinstance(report, BoundaryReached):
                report = _waited_for(report, time.perf_counter() - self._settling_since)
            self._writer.on_report(report)
            self._held.popleft()  # last: once none is held, later reports are yielded at once

    def _await(self, enough: Callable[[], bool]) -> None:
        self._waiting = True
        try:
            self._changed.wait_for(lambda: self.error is not None or enough())
        finally:
            self._waiting = False
        if self.error is not None:
            raise self.error

    def _gives_up(self) -> bool:
        return bool(self._control.stopped) or self._closed or (self._control.paused and self._waiting)


def _completed(report: ChainReport, save: Save | None) -> ChainReport:
    if save is None or not isinstance(report, BoundaryReached):
        return report
    return replace(report, reached=replace(report.reached, kept=save.kept))


def _waited_for(report: BoundaryReached, seconds: float) -> BoundaryReached:
    """Add the seconds that training waited until the chain's last state was durable, for each of its workers."""
    reached = report.reached
    spent = reached.save_seconds + seconds * max(1.0, reached.workers)
    return replace(report, reached=replace(reached, save_seconds=spent, at=reached.at + seconds))
