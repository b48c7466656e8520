"""Starts the processes of a check, at most two at a time, and hears what they tell."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from types import TracebackType

from hpstage.checking.runs import Job, Problem, Record, decode_record, encode
from hpstage.checking.ways import Process
from hpstage.threads import VARIABLES

_TOGETHER = 2
_TAIL = 2000
"""Characters of what a process has printed, shown where it died."""
Told = Callable[[Record], None]


class Children:
    """The processes of one check. Used as a context: what still runs at its end is killed.

    Args:
        trainable: cloudpickled.
        told: called with each record, by one thread at a time.
    """

    def __init__(self, trainable: bytes, told: Told) -> None:
        self._trainable = trainable
        self._told = told
        self._telling, self._starting = Lock(), Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="hpstage-check-")
        self._pool = ThreadPoolExecutor(_TOGETHER)
        self._started: list[subprocess.Popen[bytes]] = []
        self._stopped = False

    def __enter__(self) -> Children:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        self._pool.shutdown()
        self._folder.cleanup()

    def stop(self) -> None:
        """Kill what runs; nothing is started any more."""
        with self._starting:
            self._stopped = True
            for process in self._started:
                if process.poll() is None:
                    process.kill()

    def perform(self, processes: Iterable[Process]) -> None:
        """Start them, and wait for all."""
        for future in [self._pool.submit(self._perform, process) for process in processes]:
            future.result()

    def _perform(self, planned: Process) -> None:
        started = self._start(planned)
        if started is None:
            return
        process, output = started
        heard: list[Record] = []
        assert process.stdout is not None
        with process:
            for line in process.stdout:
                heard.append(decode_record(line))
                self._tell(heard[-1])
        if process.returncode and not self._stopped and len(heard) < len(planned.runs):
            run = planned.runs[len(heard)]
            self._tell(Record(name=run.name, fork=run.fork, problem=_death(process.returncode, output)))

    def _tell(self, record: Record) -> None:
        with self._telling:
            self._told(record)

    def _start(self, planned: Process) -> tuple[subprocess.Popen[bytes], Path] | None:
        with self._starting:
            if self._stopped:
                return None
            folder = Path(self._folder.name)
            file, output = (folder / f"{len(self._started)}.{name}" for name in ("job", "output"))
            job = Job(trainable=self._trainable, path=sys.path, states=str(folder / "states"), runs=planned.runs)
            file.write_bytes(encode(job))
            with output.open("wb") as errors:
                process = subprocess.Popen(
                    [sys.executable, "-m", "hpstage.checking.child", str(file)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=_environment(planned),
                )
            self._started.append(process)
            return process, output


def _environment(planned: Process) -> dict[str, str]:
    """That of this process, as a worker would have it."""
    here = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, **dict.fromkeys(VARIABLES, "1"), "PYTHONPATH": path, **planned.variables}


def _death(status: int, output: Path) -> Problem:
    printed = output.read_text(errors="replace")[-_TAIL:].strip()
    how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
    return Problem("failed", f"the process ended {how}" + (f", and had printed:\n{printed}" if printed else ""), 0)
