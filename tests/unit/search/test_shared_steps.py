"""Savings name the steps that others have trained, and none that nobody has."""

from __future__ import annotations

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape

LATE = (2, 3, 4, 5)


def search(journal: MemoryJournal, name: str, most: int = len(LATE)) -> hpstage.Result:
    def stop(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number + 1 >= most:
            study.stop()

    return hpstage.optimize(
        optuna.create_study(study_name=name, sampler=optuna.samplers.GridSampler({"late": LATE}, seed=0)),
        Tape(),
        lambda trial: {"a": s.piecewise({0: 1, 5: trial.suggest_categorical("late", LATE)})},
        metric="value",
        steps=20,
        callbacks=[stop],
        executor=SimulatedExecutor(1, kept=set()),
        store=journal,
        verify="off",
        audit="off",
    )


def test_savings_of_a_stopped_search_do_not_count_untrained_steps_as_shared() -> None:
    stopped = search(MemoryJournal(), "stopped", 2).savings
    assert stopped.steps_unique > stopped.steps_trained
    assert stopped.steps_shared == 0 and "other searches" not in str(stopped)


@pytest.mark.parametrize("first", [1, 2, 4])
def test_savings_count_steps_of_an_earlier_search_as_shared(first: int) -> None:
    journal = MemoryJournal()
    before = search(journal, "before", first).savings
    after = search(journal, "after").savings
    assert after.steps_unique == 5 + len(LATE) * 15
    assert after.steps_shared == after.steps_unique - after.steps_trained >= before.steps_trained
    assert f"({after.steps_shared:,} before or for other searches)" in str(after)
