"""Ctrl-C and SIGTERM during a search: the first signal asks it to stop cleanly, the second stops it at once."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from hpstage.source import is_users

logger = logging.getLogger("hpstage")

_KEPT = "interrupted; all that was reached is kept, and the same call goes on with a study in storage"


class Interruption:
    """Takes SIGINT and SIGTERM over while its context lasts, in the main thread and where Python's defaults stand.

    Handlers of the user's own stay, and so does a SIGINT that is ignored. Outside of :meth:`heeded` a signal raises
    ``KeyboardInterrupt`` at once, as Python does on SIGINT. A process that was asked by SIGTERM ends by it, under the
    default action, when the context is left: its parent sees what it expects, and nothing of ours is left behind.
    """

    def __init__(self) -> None:
        self.asked = False  # to stop
        self._heeding = False
        self._wake: Callable[[], None] = _nobody
        self._impatient = False  # asked once more while all is being closed
        self._terminated = False
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
        if self.asked and isinstance(error, KeyboardInterrupt):
            error.with_traceback(_from_users(error.__traceback__))
        for number, default in self._taken:
            signal.signal(number, default)  # type: ignore[arg-type]  # one of the two above
        if self._terminated:
            signal.raise_signal(signal.SIGTERM)

    @contextmanager
    def heeded(self, wake: Callable[[], None]) -> Iterator[None]:
        """Within, the first signal only sets ``asked``, for the search to see between two of its deeds.

        Args:
            wake: brings the search there, if it is training; called from the signal handler.

        Raises:
            KeyboardInterrupt: at the end, if it was asked to stop; from anywhere within at the second signal.
        """
        self._heeding, self._wake = True, wake
        try:
            yield
        finally:
            self._heeding = False
        if self.asked:
            raise KeyboardInterrupt(_KEPT)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._terminated |= number == signal.SIGTERM
        if not self.asked:
            self.asked = True
            if self._heeding:
                logger.warning("Stopping: keeping what runs; Ctrl-C again stops at once")
                self._wake()
                return
        elif not self._heeding and not self._impatient:
            self._impatient = True  # all is being closed, as fast as can be: torn apart, it would leave things behind
            return
        raise KeyboardInterrupt(_KEPT)


def _from_users(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame of the user's own on: where in hpstage it was interrupted tells nobody."""
    while trace is not None and not is_users(trace.tb_frame.f_globals.get("__name__", "")):
        trace = trace.tb_next
    return trace


def _nobody() -> None:
    """Wakes nobody."""
