"""A new training process that retrains a segment, or performs the runs of a check, and can be killed at any time."""

from __future__ import annotations

import pickle
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

from hpstage.checkpoints import CheckpointStore
from hpstage.cluster.fork_server import Forked, ForkServer, NotForked, outputs, spawning, training_environment
from hpstage.cluster.messages import (
    Done,
    Load,
    Perform,
    Raised,
    Reply,
    Request,
    Retrain,
    decode_loaded,
    decode_record,
    decode_reply,
    decode_retrained,
    framed,
    unframed,
)
from hpstage.errors.text import how_it_ended
from hpstage.execution.retraining import Problem, Retrained
from hpstage.execution.runs import Record, Run
from hpstage.executor import Environment
from hpstage.plan.messages import Segment

_TAIL = 2000
"""Maximum number of characters of a process's output that are shown if it dies."""


class FreshProcess:
    """A new training process that retrains one segment, or performs runs of a check. Not thread-safe.

    Forking the process takes milliseconds, spawning it takes seconds. It ends with this process, and on Linux also with
    the thread that has started it.

    Args:
        load: the trainable, as it is sent to workers.
        server: forks the process. If it is ``None``, or a fork would differ from a new process, the process is spawned.
        variables: additional environment variables.
    """

    def __init__(
        self, load: Load, *, server: ForkServer | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        self._result: Retrained | None = None
        self._environment: Environment | None = None
        self._record: Record | None = None
        self._performs = False
        with outputs():
            self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed with it
            self._process: Forked | subprocess.Popen[bytes]
            started = _forked(server, self._output.fileno(), variables or {})
            self._process, self._channel = started or _spawned(self._output.fileno(), variables or {})
        self._request(load)

    def start(self, segment: Segment, checkpoints: CheckpointStore) -> None:
        """Retrain a segment once the trainable is loaded. Returns at once; can be called at any time.

        Args:
            checkpoints: the store with the state from which training starts, and the states with which it is compared.
        """
        self._request(Retrain(segment, pickle.dumps(checkpoints)))

    def perform(self, run: Run, states: str) -> Record:
        """Perform a run and return its record. If the process ends, the record contains a problem.

        Args:
            states: the folder in which runs save states, and from which they load them.
        """
        self._performs, self._record = True, None
        self._request(Perform(run, states))
        while self._record is None and self._result is None:
            self._receive(None)
        problem = None if self._result is None else self._result.problem
        return self._record or Record(name=run.name, fork=run.fork, problem=problem)

    @property
    def has_ended(self) -> bool:
        """Whether the process has an outcome. :meth:`perform` may be called again as long as it has none."""
        return self._result is not None

    def described(self) -> Environment | None:
        """Wait until the process has loaded the trainable, and return its description. Return ``None`` if it could not
        load the trainable; the outcome then has the problem."""
        while self._environment is None and self._result is None:
            self._receive(None)
        return self._environment

    def poll(self) -> Retrained | None:
        """Return the outcome, or ``None`` while the process trains. Does not block."""
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> Retrained | None:
        """Return the outcome, or ``None`` if there is none within ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._result is None:
            if not self._receive(None if deadline is None else max(0.0, deadline - time.monotonic())):
                break
        return self._result

    def end(self) -> None:
        """Kill the process without waiting for its end. May be called from another thread."""
        if self._process.poll() is None:
            self._process.kill()

    def kill(self) -> None:
        """Kill the process, whether or not it has an outcome. Idempotent."""
        self._channel.close()
        self.end()
        if isinstance(self._process, subprocess.Popen):
            self._process.wait()
        self._output.close()
        if self._result is None:
            self._end(Problem("failed", "it was ended", 0))

    def _request(self, request: Request) -> None:
        with suppress(OSError):  # the process has ended, which receiving from it shows
            self._channel.sendall(framed(request))

    def _receive(self, timeout: float | None) -> bool:
        """Receive a message; return whether one arrived within ``timeout`` seconds."""
        if not select.select([self._channel], [], [], timeout)[0]:
            return False
        try:
            self._take(decode_reply(unframed(self._channel.fileno())))
        except (EOFError, OSError):
            self._end(Problem("failed", self._how_it_died(), 0))
        return True

    def _take(self, reply: Reply) -> None:
        match reply:
            case Done(value) if self._environment is None:
                loaded = decode_loaded(value)
                if loaded.problem is not None:
                    problem = loaded.problem
                    kind: Literal["failed", "refused"] = "failed" if problem.traceback else "refused"
                    self._end(Problem(kind, f"{problem.summary}\n{problem.traceback}".rstrip(), 0))
                self._environment = loaded.environment
            case Done(value) if self._performs:
                self._record = decode_record(value)
            case Done(value):
                self._result = self._result or decode_retrained(value)
            case Raised() as raised:
                self._end(Problem("failed", f"{raised.kind}: {raised.text}\n{raised.traceback}", 0))

    def _end(self, problem: Problem) -> None:
        if self._result is None:
            self._result = Retrained(steps=0, seconds=0.0, problem=problem)

    def _how_it_died(self) -> str:
        status = None
        for _ in range(100):
            status = self._process.poll()
            if status is not None:
                break
            time.sleep(0.01)  # a process closes its channel before it ends
        self._output.seek(0)
        printed = self._output.read().decode(errors="replace")[-_TAIL:].strip()
        how = "has ended" if status is None else how_it_ended(status)
        return f"the process {how}" + (f", and had printed:\n{printed}" if printed else "")


def _forked(
    server: ForkServer | None, output: int, variables: Mapping[str, str]
) -> tuple[Forked, socket.socket] | None:
    if server is None:
        return None
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            files = theirs.fileno(), output, output
            return server.fork_and_wait(files, "audit", variables=variables, path=()), ours
    except NotForked:
        ours.close()
        return None


def _spawned(output: int, variables: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            spawning(theirs.fileno(), "audit"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
            env={**training_environment(), **variables},
            process_group=0,  # Ctrl-C on a terminal must reach only the search
        )
    return process, ours
