"""The benchmark of the planner runs, and its trials are what it says."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hpstage.accounting.savings import merged
from hpstage.plan.log import open_existing_plan
from hpstage.store import SQLiteJournal
from tests.invariants import validate_scheduler
from tests.records import separated

OPTIONS = argparse.Namespace(workers=20, turns=50, store=None)


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
        return importlib.import_module("bench_planner")


@pytest.fixture(scope="module")
def load(bench: ModuleType) -> ModuleType:
    return sys.modules["planner_load"]


@pytest.mark.ci
@pytest.mark.parametrize(("kind", "trials", "nodes"), [("shared", 243, 3 + 9 + 27 + 81 + 243), ("distinct", 50, 250)])
def test_trials_of_the_planner_benchmark_share_nodes_according_to_their_kind(
    load: ModuleType, kind: str, trials: int, nodes: int
) -> None:
    driver, _, _, _ = load.new_driver(1)
    load.insert(driver, kind, trials)
    validate_scheduler(driver.scheduler)
    assert len(driver.plan.trials) == trials and len(driver.plan.nodes) == nodes
    assert (
        merged(driver.plan).steps_unique == nodes * load.LENGTH
        and merged(driver.plan).steps_asked == trials * load.STEPS
    )


@pytest.mark.ci
def test_the_executor_of_the_planner_benchmark_trains_every_requested_step(load: ModuleType) -> None:
    driver, _, _, _ = load.new_driver(7)
    load.insert(driver, "shared", 100)
    answered = 0
    while answered < 100:
        answered += len(driver.wait())
        validate_scheduler(driver.scheduler)
    assert driver.plan.totals.steps_trained == merged(driver.plan).steps_unique


@pytest.mark.ci
def test_each_part_of_the_planner_benchmark_reports_its_figures(bench: ModuleType, tmp_path: Path) -> None:
    assert bench.part_plan("shared", 200, OPTIONS)["per_s"] > 0
    assert bench.part_insert("shared", 200, OPTIONS)["per_s"] > 0
    figures = bench.part_decide("shared", 500, OPTIONS)
    assert 0 < figures["p50_us"] <= figures["p99_us"] and figures["ten_us"] > 0
    assert 0 < figures["choose_us"] < figures["one_us"]
    folded, restored = (
        bench.part_open(kind, 3000, argparse.Namespace(store=tmp_path)) for kind in ("folded", "restored")
    )
    journal = SQLiteJournal(tmp_path / "3000" / "plan.sqlite")
    assert folded["records"] == restored["records"] == len(journal)
    assert len(separated(journal)) >= 3000
    assert folded["snapshot_mb"] * 1e6 == (tmp_path / "3000" / "plan.sqlite-snapshot").stat().st_size
    plan = open_existing_plan(journal)
    journal.close()
    assert plan.totals.steps_trained == merged(plan).steps_unique and not plan.chains
