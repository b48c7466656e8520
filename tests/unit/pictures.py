"""Searches whose reports are drawn, and what their pictures say."""

from __future__ import annotations

from collections.abc import Callable

import optuna
from matplotlib.figure import Figure
from matplotlib.text import Text

import hpstage
from hpstage import schedule as s
from hpstage.algos import FullTraining, SuccessiveHalving
from hpstage.execution.simulated import Measure, SimulatedExecutor, value_of_key
from hpstage.store.memory import MemoryJournal
from hpstage.testing.toys import Failing

optuna.logging.set_verbosity(optuna.logging.ERROR)

HOSTILE = "<script>alert('x')</script> & $\\frac{$ \x1b[31m\n \N{CJK UNIFIED IDEOGRAPH-5B66}" + "long " * 40


def space(trial: optuna.Trial) -> dict[str, s.Schedule | float]:
    lr = trial.suggest_categorical("lr", [0.2, 0.1])
    first = trial.suggest_categorical("first", [4, 8, 20])
    grow = trial.suggest_categorical("grow", [6, 16])
    return {
        "lr": s.multistep(lr, milestones=[first, 24], gamma=trial.suggest_categorical("gamma", [0.1, 0.3])),
        "batch_size": s.piecewise({0: 64, grow: 128}),
    }


def continuous(trial: optuna.Trial) -> dict[str, s.Schedule]:
    drop = trial.suggest_int("drop", 1, 30)
    return {"lr": s.piecewise({0: trial.suggest_categorical("lr", [1, 2]), drop: trial.suggest_float("late", 0, 1)})}


def search(
    journal: MemoryJournal | None = None,
    *,
    name: str = "study",
    n_trials: int = 24,
    metric: str = "value",
    seed: int = 0,
    load_seconds: float = 0.2,
    measure: Measure = value_of_key,
    space: Callable[[optuna.Trial], object] = space,
    **options: object,
) -> tuple[hpstage.Result, MemoryJournal]:
    """A search on three simulated workers, where everything takes its time."""
    study = optuna.create_study(study_name=name, direction="maximize", sampler=optuna.samplers.RandomSampler(seed=seed))
    journal = MemoryJournal() if journal is None else journal
    executor = SimulatedExecutor(
        3,
        step_seconds=0.1,
        evaluate_seconds=0.3,
        load_seconds=load_seconds,
        save_seconds=0.1,
        measure=lambda key, step: {metric: next(iter(measure(key, step).values()))},
    )
    settings = {"algorithm": SuccessiveHalving(min_steps=8, reduction_factor=2), "steps": 32} | options
    result = hpstage.optimize(
        study, object(), space, metric=metric, n_trials=n_trials, executor=executor, store=journal, **settings
    )  # type: ignore[arg-type]
    return result, journal


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def failed_search() -> MemoryJournal:
    study = optuna.create_study(study_name="study")
    journal = MemoryJournal()
    hpstage.optimize(
        study,
        Failing(),
        lambda trial: {"a": s.piecewise({0: 1, 3: 7})},
        metric="score",
        steps=6,
        n_trials=2,
        algorithm=FullTraining(),
        executor=hpstage.InlineExecutor(),
        store=journal,
    )
    return journal
