"""Leaves out these tests where the fake device is not loaded; it turns torch into another, for the whole process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

if "HPSTAGE_FAKE_CUDA" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _memory_as_before() -> Iterator[None]:
    from tests.fake_cuda.plugin import fake

    yield
    for device in range(fake.count()):
        fake.set_total(device, 1 << 40)
        fake.fail_at(device, 0)
    fake.empty_cache()
