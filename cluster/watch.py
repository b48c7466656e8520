"""Detect a training process that no longer answers, or that seems to wait forever.

A process answers pings in a separate thread, even during a long step. Code that holds Python's lock prevents it from
answering, but uses the processor. A process that does neither is stopped (SIGSTOP), or waits in the kernel or in a
driver, and would never end by itself. :mod:`hpstage.scheduler.lost_workers` handles its chain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import psutil

LEAST = 10.0
"""Minimum limit in seconds: a shorter silence is normal on a loaded machine."""
_BEATS = 12
"""Number of pings within the limit."""
_BUSY = 0.01
"""Minimum share of a processor's time that a process uses if it is computing."""


class Watched(Protocol):
    """A training process. ``answers``: number of pings answered. ``reports``: number of reports sent."""

    pid: int
    answers: int
    reports: int

    def ping(self) -> None: ...

    def give_up(self, why: str) -> None: ...


class Watch:
    """Pings a process, and kills it if it has neither answered nor computed for too long.

    Args:
        limit: seconds after which a process that neither answers nor computes is killed.
        training: returns whether the process should be training now.
        warn: called with a text for the user whose subject is the process, such as ``has not answered for 5 s``.
    """

    def __init__(
        self, process: Watched, limit: float, training: Callable[[], bool], warn: Callable[[str], None]
    ) -> None:
        self._process = process
        self._limit = max(limit, LEAST)
        self._training = training
        self._warn = warn
        # Both count beats, not seconds: the time in which a machine is suspended does not count.
        self._silent = 0
        self._waiting = 0

    async def run(self) -> None:
        """Watch until the process has ended or is killed."""
        try:
            clock = psutil.Process(self._process.pid)
            while self._silent < _BEATS:
                answers, reports, used = self._process.answers, self._process.reports, _processor_seconds(clock)
                self._process.ping()
                await asyncio.sleep(self._limit / _BEATS)
                computes = _processor_seconds(clock) - used > _BUSY * self._limit / _BEATS
                self.beat(
                    answered=self._process.answers > answers,
                    reported=self._process.reports > reports,
                    computes=computes,
                )
        except psutil.Error:
            return  # it has ended
        self._process.give_up(f"it had neither answered nor computed for {self._limit:.0f} s")

    def beat(self, *, answered: bool, reported: bool, computes: bool) -> None:
        """Record the activity of the process since the last ping."""
        self._silent = 0 if answered or computes else self._silent + 1
        self._waiting = 0 if reported or computes or not self._training() else self._waiting + 1
        seconds = self._limit * 2 / _BEATS
        if self._silent == 2:
            self._warn(f"has not answered for {seconds:.0f} s; it will be ended after {self._limit:.0f} s")
        elif self._waiting == _BEATS and not self._silent:
            self._warn(
                f"has neither computed nor reported anything for {self._limit:.0f} s; it may wait forever for a "
                f"device, a file or another process. `py-spy dump --pid {self._process.pid}` on its host shows where"
            )


def _processor_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
