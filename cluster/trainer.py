"""A training process, as the process of the Dask worker sees it."""

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
"""Seconds to wait for the last messages of a process that has ended."""
_LET_GO = 10.0
"""Seconds to wait for a killed process to end. A process that waits in a device driver may never end."""


class TrainingProcessLost(Exception):
    """The process ended before it answered; the text describes how."""


class Trainer:
    """A training process, and the channel to it. Used on a single event loop, which outlives the process.

    The process inherits this process's search paths, standard streams and environment variables. It imports the user's
    modules itself, and so reads the current files. It ends when this process ends, for whatever reason.

    Attributes:
        answers, reports: numbers of the pings that the process has answered, and of its reports.
        received: chains that the process has received.
        killed: whether the process was killed from outside: by SIGKILL, as the system does when memory runs out, or by
            SIGTERM before the process ignored it.
        given_up: the reason if the worker has killed the process; otherwise empty.
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
        self._buried = asyncio.get_running_loop().create_future()  # done if its end is not waited for any more
        self._reader = reader
        self._writer = writer
        self._end = asyncio.create_task(self._await_end())
        self._replies: defaultdict[ChainId | None, asyncio.Queue[Reply | None]] = defaultdict(asyncio.Queue)
        self._gone = False  # it will not reply any more
        self._dispatching = asyncio.create_task(self._dispatch())

    @classmethod
    async def start(cls, worker: Worker) -> Trainer:
        """Start a process that trains for a Dask worker.

        Raises:
            OSError: the system allows no more processes.
        """
        with outputs() as files:
            process, ours = await _forked(worker, files) or await _spawned(worker, files)
        return cls(process, *await asyncio.open_connection(sock=ours))

    def send(self, message: Request | Order) -> None:
        """Send a message without blocking, even if the process no longer reads."""
        if not self._writer.is_closing():
            self._writer.write(framed(message))

    def ping(self) -> None:
        """Request a pong, which increments :attr:`answers`."""
        self.send(Ping())

    async def answer(
        self,
        decode: Callable[[msgspec.Raw], Result],
        on_report: Callable[[bytes], None] | None = None,
        *,
        of: ChainId | None = None,
    ) -> Result:
        """Wait for the result of a request, and return it decoded.

        Args:
            on_report: called with each encoded report before the result.
            of: the chain, for a request to train; ``None`` for the last other request.

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
        """Distribute the replies to their requests, until the process has ended."""
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
        """Wait until the process has ended, and return a text such as ``left with exit status 1``."""
        return await asyncio.shield(self._end)

    async def read_out(self) -> None:
        """Wait until all messages of a process that has ended have been read."""
        await asyncio.wait([self._dispatching])

    def give_up(self, why: str) -> None:
        """Kill the process for a reason, and treat it as ended after 10 s even if the system has not ended it."""
        self.given_up = why
        self.kill()
        asyncio.get_running_loop().call_later(_LET_GO, self._bury)

    def _bury(self) -> None:
        if not self._buried.done():
            self._buried.set_result(None)

    def kill(self) -> None:
        """Kill the process."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def finish(self, limit: float) -> None:
        """Request the process to end, and kill it after ``limit`` seconds."""
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
        # Only a child of the process can still hold the other end of the channel; no message is expected from it.
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
        ours.close()  # if the server forks it later, it ends at once
        level = logging.WARNING if isinstance(error, NoAnswer) else logging.INFO
        logger.log(level, "A training process is started without a fork, which takes seconds: %s", error)
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
            process_group=0 if local else None,  # Ctrl-C on a terminal must reach only the search
        )
    return process, ours


def _as_error(raised: Raised) -> Exception:
    kind = getattr(errors, raised.kind, None)
    if isinstance(kind, type) and issubclass(kind, UsageError):
        return kind(raised.text)
    error = InternalError(f"{raised.kind}: {raised.text}")
    error.add_note(raised.traceback)
    return error
