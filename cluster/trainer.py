"""A training process of its own, as the Dask worker's process sees it."""

from __future__ import annotations

import asyncio
import json
import multiprocessing.spawn
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from hpstage import errors
from hpstage.cluster import memory
from hpstage.cluster.messages import SIZE, Done, Finish, Order, Raised, Request, Told, decode_reply, framed
from hpstage.errors import InternalError, UsageError

# Where modules are found must be known before the first of ours is imported.
_START = (
    "import json, sys; path, sys.argv, arguments = json.loads(sys.argv[1]); sys.path[:] = path; "
    "from hpstage.cluster.training_process import main; main(*arguments)"
)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_LAST_WORDS = 1.0
"""Seconds after its end in which what a process has said must have been read."""


class TrainingProcessLost(Exception):
    """The process has ended before it answered; the text says how."""


class Trainer:
    """A process that trains, and the channel to it. Used on one event loop alone, which outlives it.

    It finds modules, files and variables as this process does now, but imports them itself, from the files as they are
    now. It ends with this process, however that ends.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._reader = reader
        self._writer = writer
        self._end = asyncio.create_task(self._await_end())

    @classmethod
    async def start(cls, worker: str) -> Trainer:
        """``worker``: the name in reports. Raises :class:`OSError` where the system allows no process more."""
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [theirs.fileno(), os.getpid(), worker]
            process = await asyncio.create_subprocess_exec(
                multiprocessing.spawn.get_executable(),
                *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]  # as multiprocessing does
                "-c",
                _START,
                json.dumps([sys.path, sys.argv, arguments]),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **memory.ENVIRONMENT, **dict.fromkeys(_THREADS, "1")},
            )
        return cls(process, *await asyncio.open_connection(sock=ours))

    def send(self, message: Request | Order) -> None:
        """Returns at once, also when nobody hears it any more."""
        if not self._writer.is_closing():
            self._writer.write(framed(message))

    async def answer(self, kind: Any, tell: Callable[[bytes], None] | None = None) -> Any:
        """What the request that was sent last has come to, of the type ``kind``; ``tell`` takes the encoded reports on
        the way.

        Raises:
            TrainingProcessLost: the process has ended.
            UsageError: the request has raised it.
            InternalError: the request has raised something else, with the traceback as a note.
        """
        while True:
            match decode_reply(await self._receive()):
                case Told(report):
                    assert tell is not None, "only chains report"
                    tell(report)
                case Done(value):
                    return msgspec.convert(value, kind)
                case Raised() as raised:
                    raise _as_error(raised)

    async def ended(self) -> str:
        """Returns when the process has: how it ended."""
        return await asyncio.shield(self._end)

    async def finish(self, limit: float) -> None:
        """Have it end; after ``limit`` seconds it is killed."""
        self.send(Finish())
        try:
            await asyncio.wait_for(self.ended(), limit)
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self.ended()

    async def _receive(self) -> bytes:
        try:
            size = await self._reader.readexactly(SIZE)
            return await self._reader.readexactly(int.from_bytes(size, "big"))
        except (asyncio.IncompleteReadError, OSError):
            raise TrainingProcessLost(await self.ended()) from None

    async def _await_end(self) -> str:
        status = await self._process.wait()
        # Who holds the other end now is a process that it has left behind; nothing is to be heard from there.
        asyncio.get_running_loop().call_later(_LAST_WORDS, self._writer.transport.abort)
        return how_it_ended(status)


def how_it_ended(status: int) -> str:
    if status == -signal.SIGKILL:
        return "was killed by SIGKILL (as the system does when memory runs out)"
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"left with exit status {status}"


def _as_error(raised: Raised) -> Exception:
    kind = getattr(errors, raised.kind, None)
    if isinstance(kind, type) and issubclass(kind, UsageError):
        return kind(raised.text)
    error = InternalError(f"{raised.kind}: {raised.text}")
    error.add_note(raised.traceback)
    return error
