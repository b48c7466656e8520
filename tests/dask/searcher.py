"""A search, to be killed, which resumes when it is called again.

Writes found.json when it is through: every trial's state, value and intermediate values, and what was trained.
"""

from __future__ import annotations

import json
from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import merged
from hpstage.algos import SuccessiveHalving
from hpstage.executor import Executor
from tests.dask.steady import Noted
from tests.invariants import validate

STEPS = 16
TRIALS = 12
INTERVAL = 4  # the most steps between checkpoints


def space(trial: optuna.Trial) -> dict[str, object]:
    return {
        "a": s.piecewise({0: trial.suggest_int("a", 1, 2), 6: trial.suggest_int("late", 1, 3)}),
        "b": s.linear(1.0, total_iters=trial.suggest_int("iters", 3, 6)),
    }


def search(folder: Path, executor: Executor, seconds: float = 0.0) -> None:
    if (folder / "found.json").exists():
        return  # it was faster than the kill
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        study_name="killed",
        storage=JournalStorage(JournalFileBackend(str(folder / "optuna.log"))),
        sampler=optuna.samplers.TPESampler(seed=7, n_startup_trials=5),
        direction="maximize",
        load_if_exists=True,
    )
    finished = [trial for trial in study.trials if trial.state.is_finished() and trial.intermediate_values]
    if len(finished) == TRIALS:
        # It was killed between its end and the writing of what it found; another call would add trials.
        dump(folder, study, None, None)
        return
    result = hpstage.optimize(
        study,
        Noted(seconds, str(folder)),
        space,
        metric="score",
        steps=STEPS,
        n_trials=TRIALS,
        algorithm=SuccessiveHalving(min_steps=4, reduction_factor=2),
        executor=executor,
        verify="off",  # which would train two steps twice
        store=folder / "plan",
        checkpoint_every=INTERVAL,
    )
    validate(result.plan)
    dump(folder, study, result.plan.totals.steps_trained, merged(result.plan).steps_unique)


def dump(folder: Path, study: optuna.Study, trained: int | None, unique: int | None) -> None:
    trials = [t for t in study.trials if t.state.is_finished() and t.intermediate_values]
    listed = [[t.params, t.state.name, t.value, t.intermediate_values] for t in trials]
    (folder / "found.json").write_text(json.dumps({"trials": listed, "trained": trained, "unique": unique}))
