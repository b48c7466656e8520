"""What is trained while things break: small exact work that tells what it did, and two searches that overlap."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna

from hpstage import schedule as s
from hpstage.algorithm import Algorithm
from hpstage.algos import FullTraining, SuccessiveHalving
from hpstage.schedule import Scalar
from hpstage.schedule.space import describe
from hpstage.testing.toys import Tape

STEPS = 48
INTERVAL = 8  # states are kept at least as often
# Rounds of the key derivation in a step: about half a millisecond of real work.
_ROUNDS = 300


class Grind(Tape):
    """A Tape whose steps are work, and which writes down in a file of its process each state that it has trained.

    Where the value ``poison`` is 1, the process dies in step ``deadly``, each time. Drivers of one plan must agree in
    all three: attributes count in a workload's identity. What a file ``pause`` in the folder says goes first.
    """

    def __init__(self, folder: str, pause: float = 0.0, deadly: int = -1) -> None:
        super().__init__()
        self.folder = folder
        self.pause = pause
        self.deadly = deadly

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        if step == self.deadly and hp["poison"] == 1:
            os.kill(os.getpid(), 9)
        told = Path(self.folder) / "pause"
        pause = told.read_text() if told.exists() else ""
        time.sleep(float(pause or self.pause))  # most of a step, so that two cores bear three workers
        super().train(step, hp)
        self.digest = hashlib.pbkdf2_hmac("sha256", self.digest.encode(), b"%d" % step, _ROUNDS).hex()
        with open(Path(self.folder) / f"steps-{os.getpid()}", "a") as steps:
            steps.write(f"{self.digest[:16]}\n")


def trained(folder: Path) -> Counter[str]:
    """How often each state was trained, according to the workers' own files."""
    states: Counter[str] = Counter()
    for path in folder.glob("steps-*"):
        # A worker that is killed in the midst of a line leaves half of one.
        states.update(line for line in path.read_text().split("\n") if len(line) == 16)
    return states


def trained_alone(round: int, params: Mapping[str, Any]) -> dict[int, Mapping[str, float]]:
    """The metrics of a trial after each step, trained in a plain loop."""
    schedules = describe(space(round), optuna.trial.FixedTrial(dict(params)), STEPS)
    with tempfile.TemporaryDirectory() as folder:
        grind = Grind(folder)
        grind.setup({name: schedule.value(0) for name, schedule in schedules.items()})
        found = {}
        for step in range(STEPS):
            grind.train(step, {name: schedule.value(step) for name, schedule in schedules.items()})
            found[step + 1] = grind.evaluate()
    return found


def space(round: int, poison: Sequence[int] = (0,)) -> Callable[[optuna.Trial], dict[str, object]]:
    """Spaces of two rounds have no state in common: each trains anew, on the same plan. ``poison``: its values."""

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
