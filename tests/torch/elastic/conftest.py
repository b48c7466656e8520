"""Followers are started once: importing torch takes longer than most that they do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.torch.elastic.followers import Followers


@pytest.fixture(scope="package")
def followers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Followers]:
    started = Followers(tmp_path_factory.mktemp("states"))
    yield started
    started.close()
