"""Ctrl-C and SIGTERM during a search: the first signal asks it to stop cleanly, the second stops it at once."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from hpstage.training.identity.source import is_users

logger = logging.getLogger("hpstage")

# Signals that it takes to tear apart what is coming up; it takes one less to tear apart a search, or its closing.
_WHILE_FRAGILE = 3

_KEPT = "interrupted; all that was reached is kept, and the same call goes on with a study in storage"


class Interruption:
    """Takes SIGINT and SIGTERM over while its context lasts, in the main thread and where Python's defaults stand.

    Handlers of the user's own stay, and so does a SIGINT that is ignored. The first signal only sets ``asked``, for the
    search to see between two of its deeds; a later one raises ``KeyboardInterrupt`` wherever it is: the second, or
    the third while a cluster is brought up or closed, which torn apart would leave things behind.

    Whoever was asked to stop and leaves the context all the same is interrupted there. A process that was asked by
    SIGTERM then ends by it, under the default action, as its parent expects.
    """

    def __init__(self) -> None:
        self.asked = False  # to stop
        self._wake: Callable[[], None] | None = None
        self._left = _WHILE_FRAGILE  # signals until it is torn apart
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
        for number, default in self._taken:
            signal.signal(number, default)  # type: ignore[arg-type]  # one of the two above
        if self._terminated:
            signal.raise_signal(signal.SIGTERM)
        if self.asked and isinstance(error, KeyboardInterrupt):
            error.with_traceback(_from_users(error.__traceback__))
        elif self.asked and error is None:
            raise KeyboardInterrupt(_KEPT)

    def started(self, wake: Callable[[], None]) -> None:
        """All that takes part is up: from now on the second signal stops at once.

        Args:
            wake: brings a search that is training to see ``asked``; called from the signal handler.
        """
        self.check()
        self._wake, self._left = wake, self._left - 1

    def check(self) -> None:
        """Raises ``KeyboardInterrupt`` where the search was asked to stop; all is closed then."""
        if self.asked:
            self._raise()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._terminated |= number == signal.SIGTERM
        first, self.asked = not self.asked, True
        self._left -= 1
        if self._left == 0:
            self._raise()
        if first and self._wake is None:
            logger.warning("Stopping as soon as all is up that can be closed")
        elif first and self._wake is not None:
            logger.warning("Stopping: keeping what runs; Ctrl-C again stops at once")
            self._wake()

    def _raise(self) -> None:
        self._left = _WHILE_FRAGILE - 1
        raise KeyboardInterrupt(_KEPT)


def _from_users(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame of the user's own on: where in hpstage it was interrupted tells nobody."""
    while trace is not None and not is_users(trace.tb_frame.f_globals.get("__name__", "")):
        trace = trace.tb_next
    return trace
