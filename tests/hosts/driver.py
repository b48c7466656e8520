"""A search in a process of its own on some host: ``python -m tests.hosts.driver SCHEDULER STORE FOLDER NAME SEED``.

Writes what became of its trials to ``NAME.txt`` in the folder, which all hosts share.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import optuna
from distributed import Client

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.executor import Executor
from hpstage.store import Journal, MemoryJournal
from tests.dask.studies import Trials, trials
from tests.hosts.watched import Watched
from tests.invariants import validate

RUNG, STEPS = 8, 32
TRIALS = 12
INTERVAL = 4  # the most steps between checkpoints

Space = Callable[[optuna.Trial], dict[str, object]]


def space(trial: optuna.Trial) -> dict[str, object]:
    values = {
        0: trial.suggest_int("first", 1, 3),
        5: trial.suggest_int("mid", 1, 3),
        12: trial.suggest_int("late", 1, 3),
    }
    return {"a": s.piecewise(values), "b": s.linear(1.0, total_iters=trial.suggest_int("iters", 3, 4))}


def gated(file: Path) -> Space:
    """The space, of which no trial but the first is made while there is the file."""

    def suggest(trial: optuna.Trial) -> dict[str, object]:
        while trial.number > 0 and file.exists():
            file.with_name(f"{file.name}-reached").touch()
            time.sleep(0.01)
        return space(trial)

    return suggest


def search(
    trainable: Watched,
    executor: Executor | Client,
    store: Journal | str,
    checkpoints: Path | None,
    space: Space = space,
    *,
    name: str,
    seed: int,
) -> hpstage.Result:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        study_name=name, direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=5)
    )
    return hpstage.optimize(
        study,
        trainable,
        space,
        metric="score",
        steps=STEPS,
        n_trials=TRIALS,
        algorithm=SuccessiveHalving(min_steps=RUNG, reduction_factor=2),
        executor=executor,
        verify="off",  # which would train two steps twice
        store=store,
        checkpoints=checkpoints,
        checkpoint_every=INTERVAL,
    )


def undisturbed(seed: int) -> Trials:
    """The study in one process that nothing happens to."""
    found = search(Watched(), hpstage.InlineExecutor(), MemoryJournal(), None, name="alone", seed=seed)
    return trials(found.study)


def main() -> None:
    scheduler, store, path, name, seed = sys.argv[1:]
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    folder = Path(path)
    with Client(scheduler, set_as_default=False) as client:
        gate = gated(folder / f"gate-{name}")
        result = search(Watched(folder, 0.005), client, store, folder / "checkpoints", gate, name=name, seed=int(seed))
    validate(result.plan)
    (folder / f"{name}.txt").write_text(repr(trials(result.study)))


if __name__ == "__main__":
    main()
