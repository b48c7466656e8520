"""The processes of checks: starting them, at most two at a time, and receiving their records."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from types import TracebackType

from hpstage.checking.runs import Job, Record, decode_record, encode
from hpstage.checking.ways import Process
from hpstage.execution.retraining import Problem
from hpstage.training.identity.threads import VARIABLES

_TOGETHER = 2
_TAIL = 2000
"""Number of characters of a process's output shown if it died."""
Take = Callable[[Record], None]


class Template:
    """A process that has imported slow libraries and none of the user's code. Each job is done by a fork of it.

    Args:
        libraries: libraries to import.
        variables: environment variables, in addition to those of this process as a worker has them.
    """

    def __init__(self, libraries: Iterable[str], variables: Mapping[str, str]) -> None:
        here = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hpstage.checking.child", *libraries],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **dict.fromkeys(VARIABLES, "1"), "PYTHONPATH": path, **variables},
            start_new_session=True,  # so that it is killed together with its forks
        )
        self._one = Lock()

    def do(self, file: Path, take: Take) -> int:
        """Have the job in ``file`` done. Return the status of the process that did it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._one:
            with suppress(BrokenPipeError):  # it was killed: there is nothing to read either
                self._process.stdin.write(f"{file}\n".encode())
                self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith(b"="):
                    return int(line[1:])
                take(decode_record(line))
        return -signal.SIGKILL

    def kill(self) -> None:
        if self._process.poll() is None:  # otherwise its id may belong to another process by now
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


class Children:
    """The processes of checks. A context manager, which kills the processes still running at its end.

    Args:
        libraries: libraries that the trainables need, imported once for several checks.
    """

    def __init__(self, libraries: Iterable[str] = ()) -> None:
        self._libraries = tuple(libraries)
        self._templates: dict[tuple[tuple[str, str], ...], Template] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="hpstage-check-")
        self._pool = ThreadPoolExecutor(_TOGETHER)
        self._delivering, self._starting = Lock(), Lock()
        self._count = 0

    def __enter__(self) -> Children:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._starting:
            for template in self._templates.values():
                template.kill()
        self._pool.shutdown(cancel_futures=True)
        for template in self._templates.values():
            template.close()
        self._folder.cleanup()

    def folder(self) -> Path:
        """Create a folder for the states of one check."""
        return Path(tempfile.mkdtemp(dir=self._folder.name))

    def perform(self, trainable: bytes, states: Path, processes: Iterable[Process], take: Take) -> None:
        """Have these processes train a cloudpickled trainable, and wait for all of them.

        ``take`` is called with each record, by one thread at a time.
        """

        def deliver(record: Record) -> None:
            with self._delivering:
                take(record)

        def perform(process: Process) -> None:
            received: list[Record] = []

            def hear(record: Record) -> None:
                received.append(record)
                deliver(record)

            job = Job(trainable=trainable, path=sys.path, states=str(states), runs=process.runs)
            with self._starting:
                self._count += 1
                file = states / f"{self._count}.job"
                template = self._template(process.variables)
            file.write_bytes(encode(job))
            status = template.do(file, hear)
            if status:
                run = process.runs[min(len(received), len(process.runs) - 1)]
                deliver(Record(name=run.name, fork=run.fork, problem=_death(status, file.with_suffix(".output"))))

        for future in [self._pool.submit(perform, process) for process in processes]:
            future.result()

    def _template(self, variables: Mapping[str, str]) -> Template:
        key = tuple(sorted(variables.items()))
        if key not in self._templates:
            self._templates[key] = Template(self._libraries, variables)
        return self._templates[key]


def _death(status: int, output: Path) -> Problem:
    printed = output.read_text(errors="replace")[-_TAIL:].strip() if output.exists() else ""
    how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
    return Problem("failed", f"the process ended {how}" + (f", and had printed:\n{printed}" if printed else ""), 0)
