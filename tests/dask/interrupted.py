"""A search in a process of its own, to be interrupted: ``python -m tests.dask.interrupted FOLDER WHERE``.

``WHERE`` is ``inline``, ``local`` (a local cluster) or the address of a scheduler.
"""

from __future__ import annotations

import sys
from pathlib import Path

import optuna
from distributed import Client
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.cluster import DaskExecutor
from hpstage.executor import Executor
from tests.dask.steady import Hanging

STEPS = 24
TRIALS = 8


def space(trial: optuna.Trial) -> dict[str, object]:
    return {
        "a": s.piecewise({0: trial.suggest_int("a", 1, 2), 14: trial.suggest_int("late", 1, 3)}),
        "b": 1.0,
    }


def search(folder: Path, executor: Executor | Client) -> hpstage.Result:
    study = optuna.create_study(
        study_name="interrupted",
        storage=JournalStorage(JournalFileBackend(str(folder / "optuna.log"))),
        sampler=optuna.samplers.TPESampler(seed=7, n_startup_trials=3),
        direction="maximize",
        load_if_exists=True,
    )
    return hpstage.optimize(
        study,
        Hanging(str(folder)),
        space,
        metric="score",
        steps=STEPS,
        n_trials=TRIALS,
        algorithm=SuccessiveHalving(min_steps=12, reduction_factor=2),
        executor=executor,
        verify="off",  # which would train two steps twice
        store=folder / "plan",
        checkpoint_every=1000,  # only at branch points and rungs
    )


def found(result: hpstage.Result) -> dict[str, object]:
    """Every trial's state, value and intermediate values, and what was trained, wasted and distinct on the plan."""
    savings = result.savings
    return {
        "trials": [
            [t.params, t.state.name, t.value, sorted(t.intermediate_values.items())] for t in result.study.trials
        ],
        "trained": savings.steps_trained,
        "wasted": savings.steps_wasted,
        "unique": savings.steps_unique,
    }


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    folder, where = Path(sys.argv[1]), sys.argv[2]
    if where == "inline":
        search(folder, hpstage.InlineExecutor())
    elif where == "local":
        sys.modules["bokeh"] = None  # type: ignore[assignment]  # with a dashboard a cluster takes a second to start
        search(folder, DaskExecutor(n_workers=2, gpus=0))
    else:
        with Client(where, set_as_default=False) as client:
            search(folder, client)


if __name__ == "__main__":
    main()
