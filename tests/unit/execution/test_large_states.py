"""Memory of training whose states are large: one of them next to what training itself takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpstage.checkpoints.host_memory import HostMemory

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_search_with_large_states_takes_the_memory_of_plain_training_plus_one_state(tmp_path: Path) -> None:
    """States of 2 GB, of which a budget of 3 GB holds one."""
    available = HostMemory().available()
    if available is None or available < 14e9:
        pytest.skip("needs 14 GB of memory, on Linux")
    subprocess.run(
        [sys.executable, ROOT / "scripts/bench_large_states.py", "--json", tmp_path / "figures", "--folder", tmp_path],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
    )
    figures = json.loads((tmp_path / "figures").read_text())
    assert figures["search"] <= 1.15 * figures["alone"] + 2
