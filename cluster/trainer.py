"""A separate training process, as seen by the Dask worker's process."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec
from distributed import Worker

from hpstage import errors
from hpstage.cluster.fork_server import Forked, NoAnswer, NotForked, outputs, spawning, training_environment
from hpstage.cluster.local_worker import LocalWorker
from hpstage.cluster.messages import (
    SIZE,
    Done,
    Finish,
    Order,
    Ping,
    Pong,
    Raised,
    Received,
    Reply,
    Reported,
    Request,
    decode_reply,
    framed,
)
from hpstage.cluster.watch import Watch
from hpstage.errors import InternalError, UsageError
from hpstage.errors.text import how_it_ended
from hpstage.plan.facts import ChainId

logger = logging.getLogger("hpstage")

Result = TypeVar("Result")

_LAST_WORDS = 1.0
"""Seconds to wait for the last messages of a process after its end."""
_LET_GO = 10.0
"""Seconds to wait for the system to end a killed process. A process that waits in a device driver may never end."""


class TrainingProcessLost(Exception):
    """The process ended before it answered; the text describes how."""


class Trainer:
    """A training process, and the channel to it. Used on a single event loop, which outlives it.

    The process inherits this process's current search paths, open files and environment variables, but imports modules
    itself, so that it reads the files as they are now. It ends when this process ends, for whatever reason.

    Attributes:
        answers, reports: number of pings that it has answered, and number of its reports.
        received: chains that the process has received.
        killed: whether the process was killed from outside: by SIGKILL, as the system does when memory runs out, or by
            SIGTERM before the process ignored it.
        given_up: the reason why its worker has ended it, other than its training; empty if the worker has not.
    """

    def __init__(
        self, process: asyncio.subprocess.Process | Forked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = process.pid
        self.given_up = ""
        self.killed = False
        self.answers = self.reports = 0
        self.received: set[ChainId] = set()
        self._process = process
        self._buried = asyncio.get_running_loop().create_future()  # whether or not the system has let it go
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
            process, ours = await _forked(worker, files) or await _spawned(worker, files)
        return cls(process, *await asyncio.open_connection(sock=ours))

    def send(self, message: Request | Order) -> None:
        """Send a message without blocking, even if the process no longer reads."""
        if not self._writer.is_closing():
            self._writer.write(framed(message))

    def ping(self) -> None:
        """Request an answer, which increments :attr:`answers`."""
        self.send(Ping())

    async def answer(
        self,
        decode: Callable[[msgspec.Raw], Result],
        on_report: Callable[[bytes], None] | None = None,
        *,
        of: ChainId | None = None,
    ) -> Result:
        """Wait for the result of a request and return it decoded: the request to train the chain ``of``, or without
        ``of`` the last other request. ``on_report`` is called with each encoded report before the result.

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
                    case Reported(report):
                        assert on_report is not None, "only chains report"
                        on_report(report)
                    case Done(value):
                        return decode(value)
                    case Raised() as raised:
                        raise _as_error(raised)
                    case None:
                        raise TrainingProcessLost(await self.ended())
        finally:
            del self._replies[of]
            if of is not None and not self._gone:
                self.received.discard(of)

    def watch(self, limit: float, training: Callable[[], bool], warn: Callable[[str], None]) -> None:
        """Start a :class:`Watch`: the process is ended if it neither answers nor computes for ``limit`` seconds."""
        watching = asyncio.create_task(Watch(self, limit, training, warn).run())
        self._end.add_done_callback(lambda _: watching.cancel())

    async def _dispatch(self) -> None:
        """Sort the replies by request, until the process has ended."""
        try:
            while True:
                reply = decode_reply(await self._receive())
                if isinstance(reply, Pong):
                    self.answers += 1
                    continue
                if isinstance(reply, Received):
                    self.received.add(reply.of)
                    continue
                self.reports += isinstance(reply, Reported)
                self._replies[reply.of].put_nowait(reply)
        except TrainingProcessLost:
            self._gone = True
            for replies in self._replies.values():
                replies.put_nowait(None)
            self._writer.close()

    async def ended(self) -> str:
        """Wait until the process has ended; return a description of how it ended."""
        return await asyncio.shield(self._end)

    async def read_out(self) -> None:
        """After the end of the process, wait until all its messages have been read."""
        await asyncio.wait([self._dispatching])

    def give_up(self, why: str) -> None:
        """Kill the process, which may wait forever, without waiting until the system has ended it."""
        self.given_up = why
        self.kill()
        asyncio.get_running_loop().call_later(_LET_GO, self._bury)

    def _bury(self) -> None:
        if not self._buried.done():
            self._buried.set_result(None)

    def kill(self) -> None:
        """End the process at once."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def finish(self, limit: float) -> None:
        """Request the process to end; kill it after ``limit`` seconds."""
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
        status = asyncio.ensure_future(self._process.wait())
        await asyncio.wait([status, self._buried], return_when=asyncio.FIRST_COMPLETED)
        # Only a process that it left behind can still hold the other end, and nothing is expected from it.
        asyncio.get_running_loop().call_later(_LAST_WORDS, self._writer.transport.abort)
        self.killed = not self.given_up and status.result() in (-signal.SIGKILL, -signal.SIGTERM)
        return f"was ended: {self.given_up}" if self.given_up else how_it_ended(status.result())


async def _forked(worker: Worker, files: tuple[int, int]) -> tuple[Forked, socket.socket] | None:
    """Fork a process, which takes milliseconds; return ``None`` if the worker has no fork server, or forking fails."""
    if not isinstance(worker, LocalWorker) or worker.fork_server is None:
        return None
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            forked = await worker.fork_server.fork(
                [theirs.fileno(), *files],
                worker.address,
                variables=worker.variables,
                path=[worker.local_directory],  # of uploaded files
            )
    except NotForked as error:
        ours.close()  # if it is forked after all, it ends at once
        level = logging.WARNING if isinstance(error, NoAnswer) else logging.INFO
        logger.log(level, "a training process is started from scratch, which takes seconds: %s", error)
        return None
    return forked, ours


async def _spawned(worker: Worker, files: tuple[int, int]) -> tuple[asyncio.subprocess.Process, socket.socket]:
    local = isinstance(worker, LocalWorker)
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *spawning(theirs.fileno(), worker.address, [worker.local_directory] if local else []),
            stdin=subprocess.DEVNULL,
            stdout=files[0],
            stderr=files[1],
            pass_fds=[theirs.fileno()],
            env={**training_environment(), **(worker.variables if local else {})},
            process_group=0 if local else None,  # Ctrl-C on a terminal is for the search alone
        )
    return process, ours


def _as_error(raised: Raised) -> Exception:
    kind = getattr(errors, raised.kind, None)
    if isinstance(kind, type) and issubclass(kind, UsageError):
        return kind(raised.text)
    error = InternalError(f"{raised.kind}: {raised.text}")
    error.add_note(raised.traceback)
    return error
