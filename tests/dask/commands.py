"""The commands ``hpstage scheduler`` and ``hpstage worker`` as processes of a test, and what can be seen of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

from distributed import Client

from hpstage.checkpoints.processes import is_alive


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def until(true: Callable[[], bool], what: str, seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"after {seconds} s still not: {what}"
        time.sleep(0.02)


class Command:
    """``hpstage ...`` in a process; what it and its children say is in ``said``."""

    def __init__(self, folder: Path, *words: str, **variables: str) -> None:
        self.words = words
        self._log = folder / f"{words[0]}-{len(list(folder.iterdir()))}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hpstage", *words],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path]).strip(os.pathsep), **variables},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def says(self, text: str) -> None:
        """Returns when it has."""
        until(lambda: text in self.said or self.process.poll() is not None, f"{self.words} says {text!r}")
        assert text in self.said, self.said

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=40)


def children(pid: int) -> set[int]:
    """Ids of the processes that a process has started, of Linux."""
    return {int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()}


def has_ended(pid: int) -> bool:
    """It is gone, or waits for its parent to ask how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return not is_alive(pid)


def workers(client: Client, count: int, *, without: Collection[int] = ()) -> set[int]:
    """Process ids of the workers, once there are ``count``, none of them in ``without``."""
    found: set[int] = set()

    def there() -> bool:
        nonlocal found
        found = set(client.run(os.getpid, on_error="ignore").values())
        return len(found) == count and found.isdisjoint(without)

    until(there, f"{count} workers are there and none of {without}")
    return found
