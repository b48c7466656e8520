"""JAX, Flax and Keras through the five methods, each in a process of its own: JAX has threads from then
on, and other tests fork."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.ci
@pytest.mark.parametrize(
    ("library", "which"),
    [
        ("jax", "not slow"),
        pytest.param("jax", "slow", marks=pytest.mark.slow),
        ("keras", "not slow"),
        ("flax", "not slow"),
    ],
)
def test_training_with_jax_flax_and_keras_forks_bit_for_bit(library: str, which: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"pip install {library}")
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        which,
        f"{HERE / f'in_{library}.py'}",
    ]
    done = subprocess.run(words, cwd=HERE.parents[1], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
