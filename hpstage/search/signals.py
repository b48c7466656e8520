"""Handling of Ctrl-C and SIGTERM: the first signal stops a search cleanly, the second stops it at once."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from hpstage.training.code.owner import is_users

logger = logging.getLogger("hpstage")

# Number of signals that abort a start-up. One less aborts a search, or its closing after a stop.
_WHILE_FRAGILE = 3


class Interruption:
    """Context manager that handles SIGINT and SIGTERM in the main thread where Python's default handlers are set.

    User-defined handlers stay, and so does an ignored SIGINT. The first signal only sets ``requested``, which the
    search checks between operations; a later one raises ``KeyboardInterrupt`` wherever it is: the second, or the third
    while a cluster is being started or closed, since aborting that would leave resources behind.

    If the context is left normally after a signal, ``KeyboardInterrupt`` is raised there, unless the search had
    completed: its result must not be lost then. A process that received SIGTERM is then ended by it, under the default
    action, as its parent expects.

    Args:
        remedy: how to continue, for the error.
    """

    def __init__(self, remedy: str = "run the same call again, with the study in storage") -> None:
        self._error = f"interrupted; all progress is kept: {remedy}"
        self.requested = False  # whether a stop was requested
        self._wake: Callable[[], None] | None = None
        self._left = _WHILE_FRAGILE  # signals left until it aborts
        self._terminated = False
        self._completed = False
        self._taken: list[tuple[signal.Signals, object]] = []

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
                if signal.getsignal(number) is default:
                    self._taken.append((number, default))
                    signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, default in self._taken:
            signal.signal(number, default)  # type: ignore[arg-type]  # one of the two above
        if self._terminated:
            signal.raise_signal(signal.SIGTERM)
        if self.requested and isinstance(error, KeyboardInterrupt):
            error.with_traceback(_from_users(error.__traceback__))
        elif self.requested and error is None and not self._completed:
            raise KeyboardInterrupt(self._error)

    def started(self, wake: Callable[[], None]) -> None:
        """Mark the start-up as complete: from now on the second signal stops at once.

        Args:
            wake: makes a search that is training check ``requested``; called from the signal handler.
        """
        self.check()
        self._wake, self._left = wake, self._left - 1

    def completed(self) -> None:
        """Mark the search as completed: there is nothing left to stop, so the first signal has no effect any more."""
        self._completed = True

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` if a stop was requested; the context managers then close everything."""
        if self.requested and not self._completed:
            self._raise()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._terminated |= number == signal.SIGTERM
        first, self.requested = not self.requested, True
        self._left -= 1
        if self._left == 0:
            self._raise()
        if first and self._completed:
            logger.warning("The search has completed and is being closed; Ctrl-C again stops at once")
        elif first and self._wake is None:
            logger.warning("Stopping as soon as the executor has started; Ctrl-C twice more stops at once")
        elif first and self._wake is not None:
            logger.warning("Stopping: saving what runs; Ctrl-C again stops at once")
            self._wake()

    def _raise(self) -> None:
        self._left = _WHILE_FRAGILE - 1
        raise KeyboardInterrupt(self._error)


def _from_users(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame of user code on, since hpstage's own frames are of no interest."""
    while trace is not None and not is_users(trace.tb_frame.f_globals.get("__name__", "")):
        trace = trace.tb_next
    return trace
