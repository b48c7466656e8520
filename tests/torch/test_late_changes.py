"""Objects that answer for their state, and leave out what begins to change only after the first fork was verified."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest

import hpstage
from hpstage import schedule as s
from hpstage.algos import FullTraining
from hpstage.algos.population_based_training import PopulationBasedTraining
from hpstage.errors import StateError
from hpstage.plan.facts import ForkVerified
from hpstage.plan.log import read_facts
from hpstage.store import MemoryJournal

pytestmark = [pytest.mark.sampled(4), pytest.mark.forks]

LATE, STEPS = 6, 20


class Anchored:
    """Weights that are drawn to where they were at a late step, which the state does not contain."""

    def setup(self, hp: Mapping[str, Any]) -> None:
        self.weights = np.ones(3)
        self.anchor: Any = None
        self.counts = {"late": 0}

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        self.last = float(self.weights.sum())  # which is written again before it is read
        self.weights = self.weights - hp["lr"] * np.random.randn(3)
        self.late(step)

    def late(self, step: int) -> None:
        if self.anchor is not None:
            self.weights = 0.9 * self.weights + 0.1 * self.anchor
        if step == LATE:
            self.anchor = self.weights.copy()

    def evaluate(self) -> dict[str, float]:
        return {"loss": float(np.abs(self.weights).sum())}

    def state_dict(self) -> Any:
        return {"weights": self.weights}

    def load_state_dict(self, state: Any) -> None:
        self.weights = state["weights"]


class Counting(Anchored):
    def late(self, step: int) -> None:
        self.weights *= 1 + self.counts["late"]
        self.counts["late"] += step >= LATE


class Growing(Anchored):
    """What is made late, and changes within: the object that holds it is no other."""

    def late(self, step: int) -> None:
        self.meters: Any = getattr(self, "meters", None) or {"seen": [0]}
        if step > LATE:
            self.meters["seen"][0] += 1
        self.weights *= 1 + self.meters["seen"][0]


class Looking(Anchored):
    """Looks for what may not be there yet, and only where it is measured."""

    def late(self, step: int) -> None:
        if step == LATE:
            self.best = self.weights.copy()

    def evaluate(self) -> dict[str, float]:
        return {"loss": float(np.abs(getattr(self, "best", self.weights)).sum())}


class Unfreezing(Anchored):
    """Of two items of a list one begins to change late."""

    def late(self, step: int) -> None:
        self.sums: Any = getattr(self, "sums", None) or [0.0, 0.0]
        self.sums[0] = float(step)
        self.sums[1] += step >= LATE
        self.weights *= 1 + 0.1 * self.sums[1]


class Noticing(Anchored):
    """As :class:`Looking`, from the first step on."""

    def late(self, step: int) -> None:
        if step == 0:
            self.best = self.weights.copy()

    evaluate = Looking.evaluate


class Buffered(Anchored):
    """Writes here and there into an array that is large, and reads it much later."""

    def setup(self, hp: Mapping[str, Any]) -> None:
        super().setup(hp)
        self.rows = np.zeros((5_000_000, 1), np.float32)

    def late(self, step: int) -> None:
        if step >= LATE:
            self.rows[1_000_003 + 7 * step] = self.weights[0]
        if step >= LATE + 10:
            self.weights += 0.01 * self.rows.sum()


class Damped(Anchored):
    """Its momentum is in no state, and matters only where there is a damping other than 1."""

    def setup(self, hp: Mapping[str, Any]) -> None:
        super().setup(hp)
        self.momentum = np.zeros(3)

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        self.momentum = (1 - hp["damping"]) * self.momentum + np.random.randn(3)
        self.weights = self.weights - 0.1 * self.momentum


class Answering(Anchored):
    def state_dict(self) -> Any:
        return {"weights": self.weights, "anchor": self.anchor}

    def load_state_dict(self, state: Any) -> None:
        self.weights, self.anchor = state["weights"], state["anchor"]


class Passed(Anchored):
    """What is kept late, and never read."""

    stateless = ("anchor",)

    def late(self, step: int) -> None:
        if step == LATE:
            self.anchor = self.weights.copy()


class Temporary(Anchored):
    """What is late, and written before it is read."""

    def late(self, step: int) -> None:
        if step >= LATE:
            self.norm = float(np.linalg.norm(self.weights))
            self.weights = self.weights / (1 + self.norm)


class Ending(Temporary):
    """Knows where its training ends."""

    def train(self, step: int, hp: Mapping[str, Any]) -> None:
        if step >= STEPS:
            raise ValueError("a step beyond the last")
        super().train(step, hp)


def space(trial: optuna.Trial) -> dict[str, Any]:
    drop = trial.suggest_categorical("drop", [LATE + 4, LATE + 6])
    return {"lr": s.multistep(0.1, [drop], gamma=0.1), "seed": 0}


def search(trainable: object, **options: Any) -> tuple[hpstage.Result, list[ForkVerified]]:
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"drop": [LATE + 4, LATE + 6]}, seed=0))
    options = {"store": MemoryJournal(), "algorithm": FullTraining(), "steps": STEPS, "n_trials": 2, **options}
    result = hpstage.optimize(
        study,
        trainable,
        options.pop("space", space),
        metric="loss",
        executor=hpstage.InlineExecutor(),
        **options,
    )
    return result, [fact for fact in read_facts(options["store"]) if isinstance(fact, ForkVerified)]


@pytest.mark.parametrize(
    ("subject", "match"),
    [
        (Anchored(), r"self\.anchor"),
        (Counting(), r"self\.counts\['late'\]"),
        (Growing(), r"self\.meters"),
        (Looking(), r"self\.best is absent"),
        (Unfreezing(), r"self\.sums"),
        (Noticing(), r"self\.best is absent"),
        (Buffered(), r"self\.rows"),
    ],
)
def test_an_attribute_outside_the_state_that_starts_to_change_late_ends_the_search(
    subject: Anchored, match: str
) -> None:
    with pytest.raises(StateError, match=match):
        search(subject)


def damped(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "damping": s.multistep(1.0, [trial.suggest_categorical("drop", [LATE + 4, LATE + 6])], gamma=0.5),
        "seed": 0,
    }


def switched(trial: optuna.Trial) -> dict[str, Any]:
    drop = trial.suggest_categorical("drop", [LATE + 4, LATE + 6])
    return {"damping": s.constant(0.5 if drop == LATE + 4 else 1), "seed": 0}


@pytest.mark.parametrize("space", [damped, switched])
def test_an_attribute_outside_the_state_is_found_if_only_other_hyperparameters_use_it(space: Any) -> None:
    with pytest.raises(StateError, match=r"self\.momentum"):
        search(Damped(), space=space)


@pytest.mark.parametrize(
    ("interval", "subject", "match"), [(LATE + 1, Anchored(), "anchor"), (1, Counting(), "counts")]
)
def test_an_attribute_outside_the_state_is_found_even_if_each_chain_ends_before_the_next_step(
    interval: int, subject: Anchored, match: str
) -> None:
    """Trials of a population wait for each other wherever they are compared."""

    def tuned(trial: optuna.Trial) -> dict[str, Any]:
        return {"lr": s.constant(trial.suggest_float("lr", 0.01, 0.1)), "seed": 0}

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    with pytest.raises(StateError, match=rf"self\.{match}"):
        hpstage.optimize(
            study,
            subject,
            tuned,
            metric="loss",
            steps=LATE + 3,
            n_trials=3,
            algorithm=PopulationBasedTraining(interval),
            executor=hpstage.InlineExecutor(),
            store=MemoryJournal(),
        )


@pytest.mark.parametrize("subject", [Answering(), Passed(), Temporary(), Ending()])
def test_attributes_that_are_restored_stateless_or_harmless_raise_no_error(subject: Anchored) -> None:
    result, verified = search(subject)
    assert all(fact.difference is None for fact in verified)
    alone, _ = search(type(subject)(), sharing=False)
    assert [t.value for t in result.study.trials] == [t.value for t in alone.study.trials]


def test_an_attribute_that_starts_to_change_late_causes_one_more_verification() -> None:
    _, verified = search(Temporary())
    assert [fact.step for fact in verified] == [2, LATE + 4]


def test_no_fork_is_verified_if_verification_is_off() -> None:
    assert search(Temporary(), verify="off")[1] == []
    search(Anchored(), verify="off")


def test_a_store_in_which_a_difference_was_found_is_refused_in_the_next_search() -> None:
    """What was kept before it was found is there, and a second call would train on from it."""
    journal = MemoryJournal()
    for match in (r"self\.anchor", r"an earlier call on this store.*self\.anchor.*use a new store"):
        with pytest.raises(StateError, match=match):
            search(Anchored(), store=journal)
    search(Anchored(), store=journal, verify="off")


def test_an_attribute_outside_the_state_is_found_when_a_second_search_continues_training(tmp_path: Path) -> None:
    journal, kept = MemoryJournal(), str(tmp_path)
    search(Anchored(), store=journal, checkpoints=kept, steps=LATE, space=whole)
    with pytest.raises(StateError, match=r"self\.anchor"):
        search(Anchored(), store=journal, checkpoints=kept, space=whole)


def whole(trial: optuna.Trial) -> dict[str, Any]:
    """One schedule for however many steps."""
    return {"lr": s.constant(trial.suggest_categorical("drop", [LATE + 4, LATE + 6]) / 100), "seed": 0}


class Once(Temporary):
    """Leaves something behind over which the same step stumbles."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def late(self, step: int) -> None:
        super().late(step)
        if step >= LATE:
            (self.folder / f"{step} {float(self.weights.sum())}").mkdir()


def test_a_step_that_fails_when_verification_repeats_it_ends_the_search(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"cannot be trained once more from a saved state.*FileExistsError"):
        search(Once(tmp_path))
