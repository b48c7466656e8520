"""Trainables put together at random: trials that share equal trials alone, bit for bit, or are refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, currently_in_test_context, event, given, settings
from hypothesis import strategies as st

from hpstage.checkpoints.state_tree import clone, digest, reread
from hpstage.errors import StateError
from hpstage.execution.verification import portrait_of
from hpstage.training.trainables import as_trainable
from tests.torch.parts import AVERAGES, FREE, KEEPERS, OPTIMIZERS, PLACES, SCHEDULERS, Composed, Recipe

pytestmark = [pytest.mark.sampled(5), pytest.mark.forks]

STEPS = 7

keepers = st.tuples(st.sampled_from(sorted(KEEPERS)), st.sampled_from(PLACES))
recipes = st.builds(
    Recipe,
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
    scheduler_in_optimizer=st.booleans(),
    form=st.sampled_from(["float32", "bfloat16", "channels_last"]),
    average=st.sampled_from(sorted(AVERAGES)),
    keepers=st.lists(keepers, max_size=3).map(tuple),
    free=st.lists(st.sampled_from(sorted(FREE)), max_size=2, unique=True).map(tuple),
    accumulate=st.integers(1, 3),
    clip=st.booleans(),
    scaler=st.booleans(),
    autocast=st.booleans(),
    norm=st.booleans(),
    dropout=st.booleans(),
    thaw=st.sampled_from([0, 0, 3, 5]),
    counts_evaluations=st.booleans(),
)


@dataclass(frozen=True)
class Trial:
    """A trial, and the fork that it begins with: of the trial before it, if there is one under its values at step 0."""

    rate: float
    drop: int
    fork: int
    live: bool
    evaluated: frozenset[int]

    def hp(self, step: int) -> dict[str, Any]:
        return {"rate": self.rate, "scale": 1.0 if step < self.drop else 0.5, "seed": 3}


trials = st.lists(
    st.builds(
        Trial,
        rate=st.sampled_from([0.01, 0.02]),
        drop=st.integers(3, STEPS),
        fork=st.integers(1, STEPS - 1),
        live=st.booleans(),
        evaluated=st.frozensets(st.integers(1, STEPS), max_size=2),
    ),
    min_size=2,
    max_size=4,
)


def outcome(trainable: Any) -> dict[str, Any]:
    return {"digest": digest(trainable.state_dict()), **portrait_of(trainable), "metrics": dict(trainable.evaluate())}


def alone(recipe: Recipe, trial: Trial) -> dict[str, Any]:
    trainable: Any = as_trainable(Composed(recipe))
    trainable.setup(trial.hp(0))
    try:
        for step in range(STEPS):
            trainable.train(step, trial.hp(step))
        return outcome(trainable)
    finally:
        trainable.close()


def shared(recipe: Recipe, tree: list[Trial]) -> list[dict[str, Any]]:
    """All trials on one worker, each from a state that an earlier one has passed, if there is such a state."""
    kept: list[tuple[Trial, int, bool, Any]] = []
    found = []
    worker: Any = as_trainable(Composed(recipe))
    try:
        for number, trial in enumerate(tree):
            forks = {later.fork: later.live for later in tree[number + 1 :]}
            worker.setup(trial.hp(0))
            start = 0
            for other, step, _, state in kept:
                if step == trial.fork and all(other.hp(s) == trial.hp(s) for s in range(step)):
                    worker.load_state_dict(state)
                    start = step
                    break
            for step in range(start, STEPS):
                worker.train(step, trial.hp(step))
                if step + 1 in trial.evaluated:
                    worker.evaluate()
                if step + 1 in forks:
                    live = forks[step + 1]
                    kept.append((trial, step + 1, live, (clone if live else reread)(worker.state_dict())))
            found.append(outcome(worker))
    finally:
        worker.close()
    return found


def note(what: str) -> None:
    if currently_in_test_context():
        event(what)


def check(recipe: Recipe, tree: list[Trial]) -> None:
    try:
        expected = [alone(recipe, trial) for trial in tree]
        found = shared(recipe, tree)
    except StateError as error:
        # The only part here that no state can hold, and it is named.
        if "iterator" not in dict(recipe.keepers) or "range_iterator" not in str(error):
            raise
        note("refused")
        return
    note("shared")
    for here, there in zip(found, expected, strict=True):
        assert {
            path: (here.get(path), there.get(path)) for path in {**here, **there} if here.get(path) != there.get(path)
        } == {}


BOUNDS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "print_blob": True,
}


@pytest.mark.ci
@settings(max_examples=10, derandomize=True, **BOUNDS)
@given(recipes, trials)
def test_trials_of_random_trainables_equal_trials_trained_without_sharing(recipe: Recipe, tree: list[Trial]) -> None:
    check(recipe, tree)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # ten minutes on two quiet cores
@settings(max_examples=1500, **BOUNDS)
@given(recipes, trials)
def test_many_trials_of_random_trainables_equal_trials_trained_without_sharing(
    recipe: Recipe, tree: list[Trial]
) -> None:
    check(recipe, tree)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", sorted(KEEPERS))
@pytest.mark.one_in(11)
@pytest.mark.ci_one_in(2)
def test_each_kind_of_state_is_captured_in_each_place(name: str, place: str) -> None:
    tree = [Trial(0.01, 5, 3, False, frozenset({2})), Trial(0.01, 6, 4, True, frozenset())]
    check(Recipe(keepers=((name, place),)), tree)
