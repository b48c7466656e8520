"""The searches that run while faults occur: two studies that overlap."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna

from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import FullTraining, SuccessiveHalving
from hpstage.schedule.space import describe
from tests.faults.grind import Grind

STEPS = 48
INTERVAL = 8  # the most steps between checkpoints


def trained(folder: Path) -> Counter[str]:
    """How often each state was trained, according to the workers' own files."""
    states: Counter[str] = Counter()
    for path in folder.glob("steps-*"):
        # A worker that is killed in the midst of a line leaves half of one.
        states.update(line for line in path.read_text().split("\n") if len(line) == 16)
    return states


def metrics_without_sharing(round: int, params: Mapping[str, Any]) -> dict[int, Mapping[str, float]]:
    """The metrics of a trial after each step, trained in a plain loop."""
    schedules = describe(space(round), optuna.trial.FixedTrial(dict(params)), STEPS).schedules
    with tempfile.TemporaryDirectory() as folder:
        grind = Grind(folder)
        grind.setup({name: schedule.value(0) for name, schedule in schedules.items()})
        found = {}
        for step in range(STEPS):
            grind.train(step, {name: schedule.value(step) for name, schedule in schedules.items()})
            found[step + 1] = grind.evaluate()
    return found


def space(round: int, poison: Sequence[int] = (0,)) -> Callable[[optuna.Trial], dict[str, object]]:
    """Spaces of two rounds have no state in common: each trains from scratch on one plan. ``poison``: its values."""

    def suggest(trial: optuna.Trial) -> dict[str, object]:
        drop = trial.suggest_categorical("drop", [12, 20, 32])
        first, late = trial.suggest_int("first", 1, 3), trial.suggest_int("late", 1, 4)
        return {
            "a": s.piecewise({0: first, drop: late}),
            "b": s.linear(1.0, total_iters=trial.suggest_int("iters", 4, 6)),
            "poison": s.piecewise({0: 0, 24: trial.suggest_categorical("poison", list(poison))}),
            "round": round,
        }

    return suggest


def sampler(kind: str, seed: int) -> optuna.samplers.BaseSampler:
    if kind == "halving":
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=5)
    return optuna.samplers.RandomSampler(seed=seed)


def algorithm(kind: str) -> Algorithm:
    return SuccessiveHalving(min_steps=12, reduction_factor=2) if kind == "halving" else FullTraining()
