"""An adapter with nothing but the documented methods."""

from __future__ import annotations

from collections.abc import Mapping

import optuna
from optuna.trial import Trial

import hpstage
from hpstage import schedule as s
from hpstage.execution.inline import InlineExecutor
from hpstage.schedule import Scalar
from hpstage.training.adapter import Adapter


class Walk:
    """An object of another library."""

    place = 1.0

    def move(self, rate: float) -> None:
        self.place += rate * self.place


class WalkAdapter(Adapter):
    def __init__(self, subject: Walk) -> None:
        self.subject = subject

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        self.subject.place = 1.0

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        self.subject.move(float(hp["lr"]))  # type: ignore[arg-type]

    def evaluate(self) -> Mapping[str, float]:
        return {"place": self.subject.place}

    def state_dict(self) -> object:
        return {"place": self.subject.place}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.subject.place = state["place"]


def space(trial: Trial) -> dict[str, s.Schedule]:
    return {"lr": s.multistep(0.5, milestones=[trial.suggest_int("drop", 2, 5)], gamma=0.1)}


def test_an_adapter_with_a_subject_and_five_methods_is_trained_and_forked() -> None:
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"drop": [2, 3, 4, 5]}))
    result = hpstage.optimize(
        study, WalkAdapter(Walk()), space, metric="place", steps=6, n_trials=4, executor=InlineExecutor()
    )
    walk = Walk()
    for drop in range(2, 6):
        walk.place = 1.0
        for step in range(6):
            walk.move(0.5 if step < drop else 0.5 * 0.1)
        [trial] = [each for each in study.trials if each.params["drop"] == drop]
        assert trial.value == walk.place
    assert result.savings.steps_trained == 5 + 4 + 3 + 2 + 1
