"""Baton: makes a training function's thread and the engine's thread run in turn, never at the same time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import TypeVar

_T = TypeVar("_T")


class Abandoned(BaseException):
    """Unwinds a training function that is no longer needed; ``except Exception`` does not catch it."""


class Baton:
    """Strict hand-over between the engine's thread and the function's: the holder runs, the other waits."""

    def __init__(self) -> None:
        self._function = threading.Lock()
        self._engine = threading.Lock()
        self._function.acquire()
        self._engine.acquire()
        self._errand: Callable[[], object] | None = None
        self.abandoned = False
        self.away = False  # held by the function
        self.paused_in: FrameType | None = None
        """The innermost frame of the function's thread while it pauses."""

    def give_back(self) -> None:
        """Pause until the baton is handed over again, running errands until then. Called by the function."""
        self.paused_in = sys._getframe()
        try:
            while not self.abandoned:
                self._engine.release()
                self._function.acquire()
                if self._errand is None:
                    break
                self._errand()
        finally:
            self.paused_in = None  # it leads to this frame again
        if self.abandoned:
            raise Abandoned

    def wait(self) -> None:
        """Wait for the first hand-over. Called by the function."""
        self._function.acquire()
        if self.abandoned:
            raise Abandoned

    def end(self) -> None:
        """Release the engine when the function ends. If the function was abandoned, the engine joins its thread
        instead."""
        if not self.abandoned:
            self._engine.release()

    def hand_over(self) -> None:
        """Run the function until it pauses or ends. Called by the engine."""
        self.away = True
        self._function.release()
        self._engine.acquire()
        self.away = False

    def abandon(self, *, ended: bool) -> None:
        """Make the function unwind, unless it has ``ended``. Called by the engine."""
        if self.away:
            # The engine was interrupted while waiting (Ctrl-C): the function is still running.
            self._engine.acquire()
            self.away = False
        self.abandoned = True
        if not ended:
            self._function.release()

    def send(self, errand: Callable[[], _T]) -> _T:
        """Run ``errand`` in the function's thread while the function is paused. Called by the engine."""
        done: Future[_T] = Future()

        def do() -> None:
            try:
                done.set_result(errand())
            except BaseException as error:
                done.set_exception(error)

        self._errand = do
        try:
            self.hand_over()
        finally:
            self._errand = None
        return done.result()
