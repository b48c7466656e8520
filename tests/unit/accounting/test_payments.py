"""Which search is charged for training."""

from __future__ import annotations

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.accounting.book import open_book
from hpstage.accounting.studies import study_rows
from hpstage.algos import FullTraining, MedianStopping
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.store import MemoryJournal


def test_steps_trained_again_for_an_evaluation_are_charged_to_the_search_that_requests_it() -> None:
    journal = MemoryJournal()

    def search(study: str, algorithm: hpstage.Algorithm) -> hpstage.Result:
        return hpstage.optimize(
            optuna.create_study(study_name=study),
            object(),
            lambda trial: {"lr": s.constant(trial.suggest_categorical("lr", [0.1]))},
            metric="value",
            steps=20,
            n_trials=1,
            algorithm=algorithm,
            executor=SimulatedExecutor(1),
            store=journal,
        )

    first = search("first", FullTraining()).savings
    assert first.steps_trained == 20
    second = search("second", MedianStopping()).savings
    assert second.steps_trained == 19  # up to the last step, which the first search has evaluated
    rows = {row.study: row for row in study_rows(open_book(journal), lambda study: False)}
    assert rows["first"].seconds_used == pytest.approx(first.worker_seconds)
    assert rows["second"].seconds_used == pytest.approx(second.worker_seconds)
