"""The benchmark of the engine: what it takes from other scripts, and that its bits are really compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_engine

    return bench_engine


def test_the_engine_benchmark_finds_figures_at_any_depth_of_reports_of_other_scripts(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = {"1 MB": {"save_stall_ratio": 0.2}, "50 MB": [{"save_stall_ratio": 0.4}, {"save_stall_ratio": 0.1}]}
    script = f"import sys; open(sys.argv[2], 'w').write({json.dumps(report)!r})"
    (tmp_path / "bench_states.py").write_text(script)
    assert dict(bench.of_others(tmp_path)) == {"save_stall_ratio": 0.2}
    assert capsys.readouterr().out.splitlines() == [
        "left out, since bench_states.py does not report it: prefetch_hidden",
        "left out, since there is no bench_elastic.py here: elastic_equal",
    ]


@pytest.mark.slow
def test_the_engine_benchmark_compares_the_bits_of_each_bundle_size(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "WIDTHS", (1, 3))
    found = bench.measure("mlp", 4, [1, 2], 1, 0.001)
    assert found["k_invariant"] and found["ratios"].keys() == {1, 2}
    monkeypatch.setattr(bench, "equal", lambda some, others: len(others) < 3)
    assert not bench.measure("mlp", 4, [1], 1, 0.001)["k_invariant"]
