"""Control: how other threads amend, pause or stop a running chain."""

from __future__ import annotations

import threading
from collections import deque
from typing import Literal

from hpstage.plan.messages import Amendment


class Control:
    """Control of a running chain from other threads: amendments and requests to stop."""

    def __init__(self) -> None:
        self._amendments: deque[Amendment] = deque()
        self._lock = threading.Lock()
        self.called = False  # read at every step without the lock: a stale value costs one step
        self.stopped: Literal["at once", "kept"] | None = None
        self.paused = False

    def amend(self, amendment: Amendment) -> None:
        with self._lock:
            self._amendments.append(amendment)
            self.called = True

    def stop(self, *, keep: bool = False) -> None:
        """End the chain at its next step; with ``keep``, save its state there first."""
        with self._lock:
            self.stopped = "kept" if keep else "at once"
            self.called = True

    def pause(self) -> None:
        """Make the chain return control at its next step. May be called from a signal handler, which can interrupt any
        line here, so it takes no lock."""
        self.paused = True
        self.called = True

    def take(self) -> list[Amendment]:
        """Return the amendments since the last call, in order. Read other requests afterwards, so that none is
        missed."""
        with self._lock:
            self.called = False  # first, so that a later call is not lost
            taken = list(self._amendments)
            self._amendments.clear()
            return taken
