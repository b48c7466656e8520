"""Runs the tests on a fake of CUDA (see :mod:`tests.fake_cuda`) in a process of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "fake_cuda"


@pytest.fixture(scope="module")
def library() -> str:
    if shutil.which("c++") is None or shutil.which("ninja") is None:
        pytest.skip("the fake device needs a C++ compiler and ninja")
    return subprocess.run(
        [sys.executable, "-m", "tests.fake_cuda.build"], check=True, capture_output=True, text=True
    ).stdout.split()[-1]


@pytest.mark.ci
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_on_fake_devices(library: str, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.fake_cuda.plugin", "-p", "no:cacheprovider", FOLDER / name],
        env={**os.environ, "HPSTAGE_FAKE_CUDA": library, "CUDA_VISIBLE_DEVICES": "0,1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
