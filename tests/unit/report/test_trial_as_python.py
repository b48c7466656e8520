"""The code of a trial on a report's page is the trial."""

from __future__ import annotations

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpstage
from hpstage import schedule as s
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.report.page import as_python
from hpstage.store.memory import MemoryJournal
from tests.unit.searches import schedules

STEPS = 12


@pytest.mark.ci
@given(schedule=schedules(STEPS), text=st.text(max_size=8))
def test_the_python_code_of_a_trial_reproduces_its_hyperparameters(schedule: s.Schedule, text: str) -> None:
    def space(trial: optuna.Trial) -> dict[str, object]:
        return {
            "a": schedule,
            "b": trial.suggest_float("b", 0, 1),
            "c": s.cosine(1.0, T_max=8),
            "text": text,
        }

    result = hpstage.optimize(
        optuna.create_study(study_name="study", sampler=optuna.samplers.RandomSampler(seed=0)),
        object(),
        space,
        metric="value",
        steps=STEPS,
        n_trials=1,
        executor=SimulatedExecutor(1),
        store=MemoryJournal(),
    )
    [trial] = result.plan.trials.values()
    *lines, last = as_python(trial).splitlines()
    names: dict[str, dict[str, object]] = {}
    exec("\n".join(lines), names)
    written = names["hyperparameters"]
    assert last == "trial = hpstage.train(trainable, hyperparameters, steps=12, store=store)"
    assert written.keys() == trial.schedules.keys()
    for name, value in written.items():
        assert s.as_schedule(value).until(STEPS) == trial.schedules[name].until(STEPS)
