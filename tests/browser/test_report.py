"""The table of trials on a report's page in a browser: sorted, filtered."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

import hpstage
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.report import write_report
from hpstage.store import MemoryJournal
from tests.browser.conftest import Open, keep
from tests.unit.reports import HOSTILE

pytestmark = pytest.mark.browser


@pytest.mark.ci
def test_the_table_of_trials_can_be_sorted_and_filtered(open_at: Open, tmp_path: Path) -> None:
    journal, study = MemoryJournal(), optuna.create_study(study_name=HOSTILE, direction="maximize")
    for b in (10, 9, 2, 33):
        study.enqueue_trial({"b": b, "c": HOSTILE if b == 2 else "plain"})
    result = hpstage.optimize(
        study,
        object(),
        lambda trial: {"b": trial.suggest_int("b", 1, 40), "c": trial.suggest_categorical("c", ["plain", HOSTILE])},
        metric="value",
        steps=2,
        n_trials=4,
        executor=SimulatedExecutor(2),
        store=journal,
    )
    page = open_at(f"file://{write_report(tmp_path, result)}")
    page.locator("summary", has_text="All 4 trials").press("Enter")  # a click may miss it, while pictures come above it
    numbers = page.locator("table.sortable tbody tr:not([hidden]) th")
    column = page.locator("table.sortable button").nth(4)  # its name changes with the arrow
    column.press("Enter")
    assert numbers.all_inner_texts() == ["2", "1", "0", "3"]
    column.press("Enter")
    assert numbers.all_inner_texts() == ["3", "0", "1", "2"]
    keep(page, "report-trials")
    page.get_by_label("Filter trials").fill("COMPLETE plain")
    assert numbers.all_inner_texts() == ["3", "0", "1"]
    assert page.locator("output").inner_text() == "3 of 4"
    assert page.evaluate("() => window.harmed") is None
