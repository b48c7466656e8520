"""Logs of training processes: what is trained again after one was killed is in a trial's log once."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.cluster import DaskExecutor
from hpstage.schedule import Scalar

STEPS = 30


class Fragile:
    """Kills its process in a step, once in each of its trials."""

    version = "1"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        self.total = 0.0

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        self.total += hp["rate"]
        hpstage.log("total", self.total)
        print("step", step, hp["rate"])  # noqa: T201  what users do
        killed = self.folder / f"killed under {hp['rate']}"
        if step == 20 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def evaluate(self) -> dict[str, float]:
        return {"total": self.total}

    def state_dict(self) -> object:
        return self.total

    def load_state_dict(self, state: float) -> None:
        self.total = state


def space(trial: optuna.Trial) -> dict[str, object]:
    return {"rate": s.multistep(1.0, milestones=[10], gamma=trial.suggest_categorical("gamma", [0.25, 0.5]))}


@pytest.mark.ci
@pytest.mark.usefixtures("nothing_ahead")
def test_steps_trained_again_after_a_kill_appear_once_in_the_log_of_the_trial(tmp_path: Path) -> None:
    study = optuna.create_study(study_name="fragile", sampler=optuna.samplers.GridSampler({"gamma": [0.25, 0.5]}))
    with closing(DaskExecutor(n_workers=2, gpus=0)) as executor:
        result = hpstage.optimize(
            study,
            Fragile(tmp_path),
            space,
            metric="total",
            steps=STEPS,
            n_trials=2,
            executor=executor,
            store=tmp_path / "store",
            checkpoint_every=6,
        )
    assert len(list(tmp_path.glob("killed under *"))) == 2
    for number in range(2):
        trial = result.trial(number)
        total, expected, printed = 0.0, dict[int, float](), list[str]()
        for step in range(STEPS):
            rate: Any = trial.hyperparameters(step)["rate"]
            total += rate
            expected[step] = total
            printed.append(f"step {step} {rate}\n")
        assert trial.log().values == {"total": expected}
        assert trial.log().output == "".join(printed)
