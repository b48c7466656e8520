"""Keep worker processes running until stopped. The chain of a worker that dies is handled by
:mod:`hpstage.scheduler.lost_workers`."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpstage.errors.text import how_it_ended

_FIRST_DELAY, _LONGEST_DELAY = 0.1, 30.0
_STEADY = 60.0
"""After a process ran for this many seconds, the delay of its restart is reset."""
_GRACE = 20.0
"""Seconds for processes to end. Cluster schedulers kill them after 30 s."""


@dataclass(frozen=True, slots=True)
class Child:
    """A process to keep running: its name in messages, its command and its complete environment."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


class Supervisor:
    """Starts processes, and restarts them when they end, with increasing delays if they end quickly.

    The first SIGTERM or SIGINT is forwarded as SIGTERM, for an orderly end. The second one kills the processes.

    Args:
        children: the processes to run.
        ready: returns when a process may be started; called before each start, never concurrently.
        log: called with each line for the user.
    """

    def __init__(
        self, children: Sequence[Child], *, ready: Callable[[], Awaitable[None]], log: Callable[[str], None]
    ) -> None:
        self._children = children
        self._ready = ready
        self._log = log
        self._turn = asyncio.Lock()
        self._running: set[asyncio.subprocess.Process] = set()
        self._first = asyncio.Event()
        self._second = asyncio.Event()

    async def run(self) -> int:
        """Run until stopped. Return the exit status: 0, or 1 if a process had to be killed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._keep(child)) for child in self._children]
        tasks.append(asyncio.create_task(self._first.wait()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises if a command cannot be run
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            killed = await self._end()
        return 1 if killed else 0

    def _on_signal(self) -> None:
        if self._first.is_set():
            self._second.set()
        else:
            self._log("stopping; interrupt again to stop at once")
            self._first.set()

    async def _keep(self, child: Child) -> None:
        delay = _FIRST_DELAY
        while True:
            async with self._turn:
                await self._ready()
            began = time.monotonic()
            # In a separate process group: Ctrl-C on a terminal must reach only the supervisor.
            process = await asyncio.create_subprocess_exec(
                *child.command, env=dict(child.environment), stdin=asyncio.subprocess.DEVNULL, process_group=0
            )
            self._running.add(process)
            status = await process.wait()
            self._running.discard(process)
            if time.monotonic() - began >= _STEADY:
                delay = _FIRST_DELAY
            self._log(f"{child.name} {how_it_ended(status)}; it is restarted in {delay:g} s")
            await asyncio.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY)

    async def _end(self) -> bool:
        """End all processes; return whether one had to be killed."""
        for process in self._running:
            _send(process, signal.SIGTERM)
        gone: asyncio.Future[Any] = asyncio.gather(*(process.wait() for process in self._running))
        at_once: asyncio.Future[Any] = asyncio.create_task(self._second.wait())
        await asyncio.wait({gone, at_once}, timeout=_GRACE, return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        left = [process for process in self._running if process.returncode is None]
        for process in left:
            _send(process, signal.SIGKILL)
        await gone
        return bool(left)


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        process.send_signal(number)
