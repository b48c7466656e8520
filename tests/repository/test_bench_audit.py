"""The benchmark of audits: its probabilities are those of the draw, and planted faults are found."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_audit

    return bench_audit


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_the_probability_that_audits_miss_a_fault_is_that_of_weighted_draws(bench: Any, count: int) -> None:
    segments = {(0, 4): False, (0, 8): True, (1, 8): False, (1, 12): False, (2, 28): False, (2, 4): True}
    random.seed(0)

    def misses() -> bool:
        left = dict(segments)
        for _ in range(count):
            [one] = random.choices(list(left), [step for _, step in left])
            if left.pop(one):
                return False
        return True

    times = 20_000
    seen = sum(misses() for _ in range(times)) / times
    assert bench.missed(segments, count) == pytest.approx(seen, abs=4 * math.sqrt(0.25 / times))


@pytest.mark.ci
def test_audits_find_planted_faults_as_often_as_computed(tmp_path: Path) -> None:
    written, scripts = tmp_path / "figures.json", ROOT / "scripts"
    command = [sys.executable, str(scripts / "bench_audit.py"), "--json", str(written), "--trials", "8"]
    faults = ("--fault", "none", "--fault", "late hook", "--fault", "file written and read back")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run([*command, *faults, "--audited", "1", "6"], check=True, env={**os.environ, "PYTHONPATH": path})
    found = json.loads(written.read_text())["faults"]
    assert found["none"]["segments"] > 0
    assert found["none"]["segments_showing"] == found["none"]["trials_showing"] == 0
    assert found["none"]["seen_6"] == found["none"]["computed_6"] == 0
    for name in ("late hook", "file written and read back"):
        one = found[name]
        assert one["segments_showing"] > 0
        for count in (1, 6):
            expected = one[f"computed_{count}"]
            spread = math.sqrt(expected * (1 - expected) / 50)
            assert one[f"seen_{count}"] == pytest.approx(expected, abs=4 * spread + 1e-3)
        assert one["computed_6"] > 0.8
