"""The oldest versions that pyproject.toml allows pass the fast tests, where they can be installed."""

from __future__ import annotations

import subprocess

import pytest

from tests.repository.test_rooms import ROOT


@pytest.mark.slow
@pytest.mark.timeout(5400)  # it installs them first: some 6 GB
def test_the_fast_tests_pass_on_the_oldest_allowed_versions_of_dependencies() -> None:
    done = subprocess.run([ROOT / "scripts" / "test_lowest"], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
