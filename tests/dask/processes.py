"""A Dask cluster of real processes, each of which can be ended and started on its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Processes:
    """A scheduler at a fixed address and workers that look for it there. Leaving the context ends them all.

    Args:
        folder: for logs and the workers' files.
        host: the scheduler's address.
        config: of Dask, for every process, by environment variable.
    """

    def __init__(self, folder: Path, host: str = "127.0.0.1", **config: str) -> None:
        self.folder = folder
        self.host = host
        self._environment = {**os.environ, **config}
        with socket.socket() as probe:
            probe.bind((host, 0))
            self.port = probe.getsockname()[1]
        self.address = f"tcp://{host}:{self.port}"
        self.started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            end(process)

    def scheduler(self) -> subprocess.Popen[bytes]:
        return self.dask("scheduler", "--host", self.host, "--port", str(self.port), "--no-dashboard")

    def worker(self, *options: str, nanny: bool = False, within: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        return self.dask(
            "worker", self.address, "--nthreads", "1", "--memory-limit", "0", "--no-dashboard",
            "--local-directory", str(self.folder), *([] if nanny else ["--no-nanny"]), *options,
            within=within,
        )  # fmt: skip

    def supervised_worker(self) -> subprocess.Popen[bytes]:
        """A worker as `hpstage worker` starts it, which saves its state when it is terminated."""
        module = "hpstage.cluster.supervised_worker"
        return self.start(
            sys.executable, "-m", module, str(os.getpid()), self.address, "--no-nanny", "--nthreads", "1",
            "--memory-limit", "0", "--no-dashboard", "--local-directory", str(self.folder), "--preload", module,
        )  # fmt: skip

    def dask(self, *words: str, within: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        return self.start(*within, sys.executable, "-m", "dask", *words)

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """A process that leads a session of its own: its children end with it."""
        with open(self.folder / f"log-{len(self.started)}", "wb") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("log-*")))


def end(process: subprocess.Popen[bytes]) -> None:
    """kill -9, its children included."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def until(condition: Callable[[], object], what: str, seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.01)


def cpu_seconds(pid: int) -> float:
    """Seconds of processor time that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_running(pid: int) -> bool:
    """Is there such a process, and is it no zombie of the kernel's?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
