"""A search with drops of the rate and growing batches, and workers on which it takes known times."""

from __future__ import annotations

import optuna

import hpstage
from hpstage import schedule as s
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.store import MemoryJournal
from hpstage.testing.toys import Tape

STEPS = 120


def space(trial):
    drops = [trial.suggest_categorical("first", [10, 30, 60]), trial.suggest_categorical("second", [80, 100])]
    return {
        "lr": s.multistep(trial.suggest_categorical("lr", [0.2, 0.1, 0.05]), milestones=drops, gamma=0.2),
        "momentum": 0.9,
        "batch_size": s.piecewise({0: 64, trial.suggest_categorical("grow", [20, 40, 80]): 256}),
    }


def random(seed=0):
    return optuna.samplers.RandomSampler(seed=seed)


def search(executor, sampler, *, algorithm=None, metric="value", n_trials=48, store=None, trainable=None):
    """The search that a preflight predicts, on real code paths only."""
    return hpstage.optimize(
        optuna.create_study(sampler=sampler),
        Tape() if trainable is None else trainable,
        space,
        metric=metric,
        steps=STEPS,
        n_trials=n_trials,
        algorithm=algorithm,
        executor=executor,
        store=MemoryJournal() if store is None else store,
    )


def true_seconds(values):
    return 0.05 if values["batch_size"] == 64 else 0.03


def truth(workers, measure=None):
    """Workers whose costs the preflight does not know."""
    more = {} if measure is None else {"measure": measure}
    return SimulatedExecutor(
        workers,
        step_seconds=true_seconds,
        evaluate_seconds=0.02,
        load_seconds=0.01,
        save_seconds=0.004,
        state_bytes=5000,
        **more,
    )
