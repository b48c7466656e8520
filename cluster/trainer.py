"""A separate training process, as seen by the Dask worker's process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from distributed import Worker

from hpstage import errors
from hpstage.cluster.fork_server import (
    START_TRAINING,
    Forked,
    NotForked,
    how_it_ended,
    python,
    search_path,
    training_environment,
)
from hpstage.cluster.local_worker import LocalWorker
from hpstage.cluster.messages import SIZE, Done, Finish, Order, Raised, Reply, Request, Told, decode_reply, framed
from hpstage.cluster.outputs import outputs
from hpstage.errors import InternalError, UsageError
from hpstage.plan.facts import ChainId

logger = logging.getLogger("hpstage")

_LAST_WORDS = 1.0
"""Seconds after its end within which a process's last messages must have been read."""


class TrainingProcessLost(Exception):
    """The process ended before it answered; the text describes how."""


class Trainer:
    """A training process, and the channel to it. Used on a single event loop, which outlives it.

    It has the current search paths, files and variables of this process, but imports modules itself, from the files as
    they are now. It ends with this process, however that ends.

    Attributes:
        given_up: why its worker has ended it, which is nothing that it trains; empty if it has not.
    """

    def __init__(
        self, process: asyncio.subprocess.Process | Forked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = process.pid
        self.given_up = ""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._end = asyncio.create_task(self._await_end())
        self._replies: defaultdict[ChainId | None, asyncio.Queue[Reply | None]] = defaultdict(asyncio.Queue)
        self._gone = False  # it will not reply any more
        self._dispatching = asyncio.create_task(self._dispatch())

    @classmethod
    async def start(cls, worker: Worker) -> Trainer:
        """Start a process that trains for a Dask worker. Raises :class:`OSError` if the system allows no more."""
        with outputs() as files:
            ours, theirs = socket.socketpair()
            with theirs:
                process = await _forked(worker, theirs, files) or await _spawned(worker, theirs, files)
        return cls(process, *await asyncio.open_connection(sock=ours))

    def send(self, message: Request | Order) -> None:
        """Send a message without blocking, even if the process no longer reads."""
        if not self._writer.is_closing():
            self._writer.write(framed(message))

    async def answer(self, kind: Any, tell: Callable[[bytes], None] | None = None, *, of: ChainId | None = None) -> Any:
        """Return the result of the request to train a chain, or of the last other one, of type ``kind``; ``tell``
        receives the encoded reports before it.

        Raises:
            TrainingProcessLost: the process has ended.
            UsageError: raised by the request.
            InternalError: the request raised another exception, with the traceback as a note.
        """
        replies = self._replies[of]
        if self._gone:
            replies.put_nowait(None)
        try:
            while True:
                match await replies.get():
                    case Told(report):
                        assert tell is not None, "only chains report"
                        tell(report)
                    case Done(value):
                        return msgspec.convert(value, kind)
                    case Raised() as raised:
                        raise _as_error(raised)
                    case None:
                        raise TrainingProcessLost(await self.ended())
        finally:
            del self._replies[of]

    async def _dispatch(self) -> None:
        """Sort the replies by request, until the process has ended."""
        try:
            while True:
                reply = decode_reply(await self._receive())
                self._replies[reply.of].put_nowait(reply)
        except TrainingProcessLost:
            self._gone = True
            for replies in self._replies.values():
                replies.put_nowait(None)
            self._writer.close()

    async def ended(self) -> str:
        """Wait until the process has ended and return how."""
        return await asyncio.shield(self._end)

    def give_up(self, why: str) -> None:
        """End the process at once, since it may wait without end for another one."""
        self.given_up = why
        self.kill()

    def kill(self) -> None:
        """End the process at once."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def finish(self, limit: float) -> None:
        """Ask the process to end; after ``limit`` seconds it is killed."""
        self.send(Finish())
        try:
            await asyncio.wait_for(self.ended(), limit)
        except TimeoutError:
            self.kill()
            await self.ended()

    async def _receive(self) -> bytes:
        try:
            size = await self._reader.readexactly(SIZE)
            return await self._reader.readexactly(int.from_bytes(size, "big"))
        except (asyncio.IncompleteReadError, OSError):
            raise TrainingProcessLost(await self.ended()) from None

    async def _await_end(self) -> str:
        status = await self._process.wait()
        # Only a process that it left behind can still hold the other end, and nothing is expected from it.
        asyncio.get_running_loop().call_later(_LAST_WORDS, self._writer.transport.abort)
        return f"was ended: {self.given_up}" if self.given_up else how_it_ended(status)


async def _forked(worker: Worker, channel: socket.socket, files: tuple[int, int]) -> Forked | None:
    """Fork a process, which takes milliseconds, for a worker that has a server for that; ``None`` if that cannot be."""
    if not isinstance(worker, LocalWorker) or worker.fork_server is None:
        return None
    try:
        return await worker.fork_server.fork(
            [channel.fileno(), *files],
            worker.address,
            variables=worker.variables,
            path=[worker.local_directory],  # of uploaded files
        )
    except NotForked as error:
        logger.info("a training process is started anew, which takes seconds: %s", error)
        return None


async def _spawned(worker: Worker, channel: socket.socket, files: tuple[int, int]) -> asyncio.subprocess.Process:
    local = isinstance(worker, LocalWorker)
    path = [worker.local_directory, *search_path()] if local else search_path()
    return await asyncio.create_subprocess_exec(
        *python(),
        "-c",
        START_TRAINING,
        json.dumps([path, sys.argv, [channel.fileno(), os.getpid(), worker.address]]),
        stdin=subprocess.DEVNULL,
        stdout=files[0],
        stderr=files[1],
        pass_fds=[channel.fileno()],
        env={**training_environment(), **(worker.variables if local else {})},
        process_group=0 if local else None,  # Ctrl-C on a terminal is for the search alone
    )


def _as_error(raised: Raised) -> Exception:
    kind = getattr(errors, raised.kind, None)
    if isinstance(kind, type) and issubclass(kind, UsageError):
        return kind(raised.text)
    error = InternalError(f"{raised.kind}: {raised.text}")
    error.add_note(raised.traceback)
    return error
