"""Strict hand-over between the thread of a training function and the engine's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


class Abandoned(BaseException):
    """Unwinds a training function that is needed no more; no ``except Exception`` stops it."""


class Baton:
    """Strict hand-over between the engine's thread and the function's: who has it runs, the other waits."""

    def __init__(self) -> None:
        self._function = threading.Lock()
        self._engine = threading.Lock()
        self._function.acquire()
        self._engine.acquire()
        self._errand: Callable[[], object] | None = None
        self.abandoned = False
        self.away = False  # the function has it

    def give_back(self) -> None:
        """The function's side: pause until it is handed over again, and do errands meanwhile."""
        while not self.abandoned:
            self._engine.release()
            self._function.acquire()
            if self._errand is None:
                break
            self._errand()
        if self.abandoned:
            raise Abandoned

    def wait(self) -> None:
        """The function's side, at its beginning."""
        self._function.acquire()
        if self.abandoned:
            raise Abandoned

    def end(self) -> None:
        """The function's side, at its end. An abandoned one is waited for by joining its thread."""
        if not self.abandoned:
            self._engine.release()

    def hand_over(self) -> None:
        """The engine's side: let the function run until it pauses or ends."""
        self.away = True
        self._function.release()
        self._engine.acquire()
        self.away = False

    def abandon(self, *, ended: bool) -> None:
        """The engine's side: have the function unwind, unless it has ``ended``."""
        if self.away:
            # The engine was interrupted while it waited (Ctrl-C): the function still runs.
            self._engine.acquire()
            self.away = False
        self.abandoned = True
        if not ended:
            self._function.release()

    def send(self, errand: Callable[[], _T]) -> _T:
        """The engine's side: have something done in the function's thread, while the function is paused."""
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
