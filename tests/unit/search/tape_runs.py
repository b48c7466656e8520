"""Runs and searches of tapes, and what tests look at in their trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optuna

import hpstage
from hpstage import schedule as s
from hpstage.search.results.trial import TrainedTrial
from hpstage.testing.toys import Tape, alone

optuna.logging.set_verbosity(optuna.logging.ERROR)
STEPS = 8
HP: dict[str, Any] = {"lr": s.cosine(0.5, T_max=STEPS), "wd": 0.25}


def inline() -> dict[str, Any]:
    return {"executor": hpstage.InlineExecutor()}


def train(store: object, hp: object = HP, steps: int = STEPS, trainable: object = None, **options: Any) -> Any:
    options = {"metric": "score", **options}
    return hpstage.train(trainable or Tape(), hp, steps=steps, store=store, **inline(), **options)  # type: ignore[call-overload]


def search(store: object, space: Any, steps: int = STEPS, **options: Any) -> hpstage.Result:
    study = optuna.create_study(study_name="tapes", direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
    settings = {"trainable": Tape(), "n_trials": 3, **inline(), **options}
    return hpstage.optimize(study, space=space, metric="score", steps=steps, store=store, **settings)  # type: ignore[arg-type]


class NeverSetUp(Tape):
    def setup(self, hp: Mapping[str, Any]) -> None:
        raise ValueError("not before setup")


def exact(trial: TrainedTrial) -> bool:
    """Whether a trial's last state and metrics are those of its schedules trained in a plain loop."""
    steps = trial.planned.steps
    tape = alone(trial.schedules, steps)
    return trial.metrics[steps] == tape.evaluate() and trial.state(steps) == tape.state_dict()


def trained(trial: TrainedTrial) -> int:
    """Return the number of steps trained on the store."""
    assert trial.lineage is not None
    return hpstage.open(str(trial.lineage.store)).plan.totals.steps_trained
