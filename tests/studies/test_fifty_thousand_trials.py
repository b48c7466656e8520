"""The objects of a store at the size of a large study: each saved state has the content that it was saved with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

import hpstage
from hpstage.checkpoints.folder import FolderCheckpoints
from hpstage.schedule import multistep

TRIALS, STEPS, PLACES = 50_000, 4, (1, 2, 3)
FILES = 100
"""The most files for a thousand trials."""


class Walk:
    """Adds up its hyperparameter; a part of its state is the same in all states, another in all of a trial."""

    version = "1"

    def setup(self, hp: dict[str, Any]) -> None:
        self.frozen = np.arange(256, dtype=np.float32)
        self.first = np.full(64, hp["lr"])
        self.sums = np.zeros(STEPS)

    def train(self, step: int, hp: dict[str, Any]) -> None:
        self.sums[step] = hp["lr"] * (step + 1)

    def evaluate(self) -> dict[str, float]:
        return {"value": float(self.sums.sum())}

    def state_dict(self) -> dict[str, Any]:
        return {"frozen": self.frozen, "first": self.first, "sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.frozen, self.first, self.sums = state["frozen"], state["first"].copy(), state["sums"].copy()


def rates(params: dict[str, Any]) -> list[float]:
    """Return the values of a trial's hyperparameter in all steps."""
    first = float(params["rate"] + 1)
    return [first if step < params["at"] else first * 0.5 for step in range(STEPS)]


def space(trial: optuna.Trial) -> dict[str, Any]:
    rate, at = trial.suggest_int("rate", 0, 19_999), trial.suggest_categorical("at", PLACES)
    return {"lr": multistep(float(rate + 1), [at], gamma=0.5)}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_saved_state_of_fifty_thousand_trials_has_its_exact_content(tmp_path: Path) -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    result = hpstage.optimize(
        study,
        Walk(),
        space,
        metric="value",
        steps=STEPS,
        n_trials=TRIALS,
        store=tmp_path / "store",
        executor=hpstage.InlineExecutor(),
    )
    plan, trials, seen = result.plan, study.trials, set[str]()  # each access to study.trials copies them all
    store = FolderCheckpoints(tmp_path / "store" / "checkpoints", plan.workload)
    for trial, planned in zip(trials, plan.trials.values(), strict=True):
        lr = rates(trial.params)
        assert trial.value == sum(rate * (step + 1) for step, rate in enumerate(lr))
        for node, start, stop in planned.path_to(STEPS):
            for step in range(start + 1, stop + 1):
                state, key = node.state(step), plan.key(node, step)
                if state is None or state.kept is None or key in seen:
                    continue
                seen.add(key)
                found: Any = store.load(key)
                assert np.array_equal(found["frozen"], np.arange(256, dtype=np.float32))
                assert np.array_equal(found["first"], np.full(64, lr[0]))
                assert found["sums"].tolist() == [lr[at] * (at + 1) if at < step else 0.0 for at in range(STEPS)]
    assert len(seen) > 10_000
    assert sum(path.is_file() for path in (tmp_path / "store").rglob("*")) <= FILES * TRIALS / 1000
