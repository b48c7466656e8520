"""Records what the user's code logs and prints while it trains, and saves it.

Printed text still reaches its stream. The stream objects stay in place, since handlers of ``logging`` and the user's
objects refer to them. Only their ``write`` is replaced, by a function that also calls the recorder.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType
from typing import Any, Self

from hpstage.checkpoints import CheckpointStore
from hpstage.errors import CheckpointError
from hpstage.execution.flight import Flight
from hpstage.plan.facts import StateKey
from hpstage.training.body import THREAD
from hpstage.training.step_log import Recorder, Sink, exchanged

logger = logging.getLogger("hpstage")

_recorder: Recorder | None = None
_thread = 0  # id of the training thread
_streams: list[Any] = []  # streams whose write is replaced: standard output, standard error


class Recording:
    """A context in which ``recorder`` also receives the text that the training thread prints and, with ``logs``, the
    values that it logs.

    Output of other threads and processes is not recorded, since it may be the driver's.
    """

    __slots__ = ("_before", "_logs", "_recorder")

    def __init__(self, recorder: Recorder | None, *, logs: bool = True) -> None:
        self._recorder = recorder
        self._logs = logs

    def __enter__(self) -> Self:
        global _recorder, _thread
        if sys.stdout not in _streams or sys.stderr not in _streams:
            _listen()
        self._before: tuple[Sink | None, Recorder | None] = (
            exchanged(self._recorder if self._logs else None),
            _recorder,
        )
        _recorder, _thread = self._recorder, threading.get_ident()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _recorder
        sink, _recorder = self._before
        exchanged(sink)


def _listen() -> None:
    release_streams()
    for stream in (sys.stdout, sys.stderr):
        _streams.append(stream)
        own = getattr(stream, "__dict__", None)
        if own is not None and not isinstance(own.get("write"), _Write):
            stream.write = _Write(stream.write, "write" in own)  # type: ignore[method-assign]


def release_streams() -> None:
    """Restore the streams."""
    for stream in _streams:
        write = getattr(stream, "__dict__", {}).get("write")
        if isinstance(write, _Write):
            if write.was_own:
                stream.write = write.write
            else:
                del stream.write
    _streams.clear()


class _Write:
    """Writes to the stream and to the recorder.

    Args:
        write: the stream's original method.
        was_own: whether that was an attribute of the stream instead of its class.
    """

    def __init__(self, write: Any, was_own: bool) -> None:
        self.write, self.was_own = write, was_own

    def __call__(self, text: str) -> Any:
        recorder = _recorder
        if recorder is not None and isinstance(text, str) and _is_training():
            recorder.write(text)
        return self.write(text)


def _is_training() -> bool:
    return threading.get_ident() == _thread or threading.current_thread().name == THREAD


class Logs:
    """Saves the logs of chains. A log that cannot be saved is lost, but training continues."""

    def __init__(self, checkpoints: CheckpointStore) -> None:
        self._checkpoints = checkpoints
        self._lost_one = False

    def save(self, flight: Flight, key: StateKey, stop: int) -> None:
        """Save the logged values and printed text of the steps before ``stop``."""
        log = flight.recorder.take(stop)
        if log is None:
            return
        try:
            self._checkpoints.save_log(key, log)
        except CheckpointError as error:
            if not self._lost_one:
                self._lost_one = True
                logger.warning(
                    "A training log is lost: %s. Training continues; further losses are not reported.", error
                )

    def save_last(self, flight: Flight) -> None:
        """Save the log and output of an unfinished step, under the key of the state that it would have produced."""
        if flight.step < flight.course.stages[-1].stop:
            self.save(flight, flight.course.own(flight.step + 1).key, flight.step + 1)
