"""Runs the tests on a fake of CUDA (see :mod:`tests.fake_cuda`) in a process of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
FILES = [
    *sorted((TESTS / "fake_cuda").glob("test_*.py")),
    TESTS / "store/test_live_cache.py",
    TESTS / "torch/test_measure.py",
]


@pytest.fixture(scope="module")
def library() -> str:
    if shutil.which("c++") is None or shutil.which("ninja") is None:
        pytest.skip("the fake device needs a C++ compiler and ninja")
    return subprocess.run(
        [sys.executable, "-m", "tests.fake_cuda.build"], check=True, capture_output=True, text=True
    ).stdout.split()[-1]


@pytest.mark.ci
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_on_fake_devices(library: str, file: Path) -> None:
    """All that is about the fake devices, and what is marked as needing a device elsewhere."""
    marked = [] if file.parent.name == "fake_cuda" else ["-m", "gpu"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.fake_cuda.plugin", "-p", "no:cacheprovider", *marked, file],
        env={**os.environ, "HPSTAGE_FAKE_CUDA": library, "CUDA_VISIBLE_DEVICES": "0,1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
