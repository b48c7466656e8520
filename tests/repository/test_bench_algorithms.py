"""What the benchmark of the algorithms shows holds: searches equal those without sharing, closed forms are exact."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import optuna
import pytest

optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
        return importlib.import_module("bench_algorithms")


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*is experimental:optuna.exceptions.ExperimentalWarning")
def test_synchronous_searches_end_with_the_same_study_with_and_without_sharing(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "GRID", {name: choices[:2] for name, choices in bench.GRID.items()})  # 16 trials, not 72
    rows = bench.algorithms(9)
    assert {"grid", "SHA", "ASHA", "Hyperband", "PBT"} <= {row["algorithm"] for row in rows}
    for row in rows:
        if row["synchronous"]:
            assert row["same_best"] and row["same_study"], row["algorithm"]
        assert row["steps_unique"] <= row["steps_trained"] < row["steps_trained_unshared"] == row["steps_asked"]


@pytest.mark.ci
def test_merge_rates_of_the_benchmark_equal_those_calculated_by_hand(bench: ModuleType) -> None:
    assert all(row["exact"] for row in bench.closed_forms())
