"""Studies on a Dask cluster that something happens to, and what they must come to all the same."""

from __future__ import annotations

import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from distributed import Client

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import merged
from hpstage.algos import SuccessiveHalving
from hpstage.executor import Executor
from hpstage.plan.facts import ChainStarted, DriverJoined, Fact, StateReached
from hpstage.plan.log import read_facts
from hpstage.store import Journal, MemoryJournal, SQLiteJournal
from hpstage.testing.toys import Tape
from tests.dask.steady import RUNG, Steady

STEPS = 16
TRIALS = 12
INTERVAL = 4  # the most steps between checkpoints

Trials = list[tuple[dict[str, Any], str, float | None, dict[int, float]]]


def steps_by_process(folder: Path) -> dict[int, int]:
    """Steps that each worker's process has had trained, those included that are in no journal."""
    return {int(path.name.partition("-")[2]): path.stat().st_size for path in folder.glob("steps-*")}


def space(trial: optuna.Trial) -> dict[str, object]:
    return {
        "a": s.piecewise({0: trial.suggest_int("a", 1, 2), 6: trial.suggest_int("late", 1, 3)}),
        "b": s.linear(1.0, total_iters=trial.suggest_int("iters", 3, 6)),
    }


def search(
    trainable: Tape,
    executor: Executor | Client,
    store: Journal | Path,
    checkpoints: Path | None = None,
    *,
    name: str = "study",
    seed: int = 7,
    n_trials: int = TRIALS,
    show_progress_bar: bool = False,
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
        n_trials=n_trials,
        algorithm=SuccessiveHalving(min_steps=RUNG, reduction_factor=2),
        executor=executor,
        verify="off",  # which would train two steps twice
        store=store,
        checkpoints=checkpoints,
        checkpoint_every=INTERVAL,
        show_progress_bar=show_progress_bar,
    )


def trials(study: optuna.Study) -> Trials:
    return [(trial.params, trial.state.name, trial.value, trial.intermediate_values) for trial in study.trials]


def undisturbed(seed: int = 7, n_trials: int = TRIALS) -> tuple[Trials, int]:
    """The study of an undisturbed search in one process, and its unique steps."""
    result = search(Steady(None), hpstage.InlineExecutor(), MemoryJournal(), seed=seed, n_trials=n_trials)
    return trials(result.study), merged(result.plan).steps_unique


class Running:
    """A search in a thread of this process, whose journal can be looked at while it runs."""

    def __init__(self, trainable: Tape, executor: Executor | Client, folder: Path, name: str = "study") -> None:
        self.journal = MemoryJournal()
        self._pool = ThreadPoolExecutor(1)
        self._future: Future[hpstage.Result] = self._pool.submit(
            search, trainable, executor, self.journal, folder / "states", name=name
        )

    def facts(self) -> list[Fact]:
        return list(read_facts(self.journal))

    def reached(self) -> list[StateReached]:
        return [fact for fact in self.facts() if isinstance(fact, StateReached)]

    def started(self) -> list[ChainStarted]:
        return [fact for fact in self.facts() if isinstance(fact, ChainStarted)]

    def pools(self) -> list[str]:
        return [fact.pool for fact in self.facts() if isinstance(fact, DriverJoined)]

    @property
    def over(self) -> bool:
        return self._future.done()

    def result(self, seconds: float = 150.0) -> hpstage.Result:
        try:
            return self._future.result(seconds)
        finally:
            self._pool.shutdown(wait=False)


def until_joined(plan: str, count: int) -> None:
    """Returns when so many drivers have joined a plan."""
    joined = 0
    while joined < count:
        time.sleep(0.05)
        with closing(SQLiteJournal(Path(plan), read_only=True)) as journal:
            joined = sum(isinstance(fact, DriverJoined) for fact in read_facts(journal))


def main() -> None:
    """``python -m tests.dask.studies ADDRESS FOLDER NAME SEED SECONDS [DRIVERS]``: a search in a process of its own.

    One of its steps ends when so many drivers, itself included, have joined its plan.
    """
    address, folder, name, seed, seconds, *drivers = sys.argv[1:]
    plan = Path(folder) / "plan"
    together = partial(until_joined, str(plan / "plan.sqlite"), int(drivers[0]) if drivers else 1)
    with Client(address, set_as_default=False) as client:
        result = search(Steady(Path(folder), float(seconds), together), client, plan, name=name, seed=int(seed))
    (Path(folder) / f"{name}.txt").write_text(repr(trials(result.study)))


if __name__ == "__main__":
    main()
