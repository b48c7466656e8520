"""Forked training is bit-identical to training straight through."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.state_tree import clone, digest
from hpstage.plan.facts import StateKey
from hpstage.testing import TrainableContract
from hpstage.testing.toys import Tape
from hpstage.training.randomness import Purpose, rekey
from hpstage.training.sample_order import SampleOrder
from tests.torch.trainables import (
    CASES,
    FORK,
    STEPS,
    Averaged,
    Small,
    advance,
    forked,
    fresh,
    hp_at,
    network,
    ordinary_loop,
    outcome,
    samples,
    sgd,
)

pytestmark = [pytest.mark.sampled(16), pytest.mark.forks]


class Noisy(Small):
    """Draws from all global generators, in training and in evaluation; scales by the present learning rate."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return super().loss(model, batch) * noise

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {
            "noise": random.random(),
            "numpy": np.random.rand(),
            "torch": torch.rand(()).item(),
            "lr": self.hp["lr"],
        }


class Cached(Small):
    """A non-persistent buffer that training changes."""

    def model(self, hp: Any) -> nn.Module:
        model = super().model(hp)
        model.register_buffer("seen", torch.zeros(()), persistent=False)
        return model

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        model.seen += 1
        return super().loss(model, batch) / model.seen


class Drawing:
    """A Trainable of the user's own: a sum of draws from the global generators."""

    def setup(self, hp: Any) -> None:
        self.total = random.random()

    def train(self, step: int, hp: Any) -> None:
        self.total += random.random() + np.random.rand()

    def evaluate(self) -> dict[str, float]:
        return {"total": self.total, "noise": random.random()}

    def state_dict(self) -> float:
        return self.total

    def load_state_dict(self, state: Any) -> None:
        self.total = state


EVERY_STYLE: dict[str, Callable[[], object]] = {
    **CASES,
    "noise": Noisy,
    "buffer": Cached,
    "five methods": Drawing,
    "tape": Tape,
}


@pytest.mark.ci_one_in(2)
class TestTrainables(TrainableContract):
    steps, fork = STEPS, FORK

    @pytest.fixture(params=EVERY_STYLE)
    def make_trainable(self, request: pytest.FixtureRequest) -> Callable[[], object]:
        return EVERY_STYLE[request.param]

    @pytest.fixture
    def values_at(self) -> Callable[[int], dict[str, Any]]:
        return hp_at


@pytest.fixture(scope="module")
def straight() -> dict[str, list[object]]:
    return {name: outcome(advance(fresh(make()), 0, STEPS)) for name, make in CASES.items()}


@pytest.fixture(scope="module")
def states() -> dict[str, object]:
    return {name: clone(advance(fresh(make()), 0, FORK).state_dict()) for name, make in CASES.items()}


@pytest.fixture(autouse=True)
def _generators_used_by_others() -> None:
    """What others draw from the global generators must not matter."""
    random.random()
    np.random.rand(3)
    torch.rand(5)


@pytest.mark.parametrize("name", CASES)
def test_fork_in_a_fresh_object_equals_training_straight_through(
    name: str, straight: dict[str, Any], states: dict[str, Any]
) -> None:
    assert outcome(forked(CASES[name](), states[name])) == straight[name]


def test_fork_in_a_new_process_equals_training_straight_through(
    straight: dict[str, Any], states: dict[str, Any], tmp_path: Path
) -> None:
    store = FolderCheckpoints(str(tmp_path), "tests")
    for name, state in states.items():
        store.save(StateKey(name), state, step=FORK, parent=None)
    command = [sys.executable, "-m", "tests.torch.trainables", str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == straight


@pytest.mark.parametrize("name", CASES)
def test_fork_in_an_object_that_has_trained_before_equals_training_straight_through(
    name: str, straight: dict[str, Any], states: dict[str, Any]
) -> None:
    trainable = advance(fresh(CASES[name]()), 0, STEPS)
    trainable.evaluate()
    trainable.setup(hp_at(0))
    trainable.load_state_dict(states[name])
    assert outcome(advance(trainable, FORK, STEPS)) == straight[name]


@pytest.mark.parametrize("name", CASES)
def test_setup_resets_all_effects_of_earlier_training(name: str, straight: dict[str, Any]) -> None:
    trainable = advance(fresh(CASES[name]()), 0, 3)
    trainable.setup(hp_at(0))
    assert outcome(advance(trainable, 0, STEPS)) == straight[name]


@pytest.mark.parametrize("name", CASES)
def test_training_from_a_loaded_state_does_not_change_that_state(name: str, states: dict[str, Any]) -> None:
    before = digest(states[name])
    forked(CASES[name](), states[name])
    assert digest(states[name]) == before


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_state_equals_the_saved_state(name: str, states: dict[str, Any]) -> None:
    trainable = fresh(CASES[name]())
    trainable.load_state_dict(states[name])
    assert digest(trainable.state_dict()) == digest(states[name])


@pytest.mark.parametrize("name", CASES)
def test_evaluating_at_every_step_does_not_change_training(name: str, straight: dict[str, Any]) -> None:
    trainable = fresh(CASES[name]())
    for step in range(STEPS):
        advance(trainable, step, step + 1)
        trainable.evaluate()
    assert outcome(trainable) == straight[name]


def test_a_fork_draws_the_noise_of_training_straight_through_from_all_global_generators() -> None:
    state = clone(advance(fresh(Noisy()), 0, FORK).state_dict())
    assert outcome(forked(Noisy(), state)) == outcome(advance(fresh(Noisy()), 0, STEPS))


def test_evaluate_of_a_loaded_state_reads_the_hyperparameters_of_its_last_step() -> None:
    trained = advance(fresh(Noisy()), 0, 8)
    loaded = fresh(Noisy())
    loaded.load_state_dict(clone(trained.state_dict()))
    assert trained.evaluate() == loaded.evaluate()
    assert trained.evaluate()["lr"] == 0.01


def test_non_persistent_buffers_are_in_the_state() -> None:
    state = clone(advance(fresh(Cached()), 0, FORK).state_dict())
    assert outcome(forked(Cached(), state)) == outcome(advance(fresh(Cached()), 0, STEPS))


def test_different_seeds_give_different_initial_and_trained_weights() -> None:
    def after(seed: int, steps: int) -> str:
        trainable = fresh(Small(), {**hp_at(0), "seed": seed})
        for step in range(steps):
            trainable.train(step, {**hp_at(step), "seed": seed})
        state: Any = trainable.state_dict()
        return digest(state["model"])

    assert after(0, 0) != after(1, 0)
    assert after(0, 2) != after(1, 2)
    assert after(1, 2) == after(1, 2)


def test_the_average_of_weights_is_saved_next_to_the_weights() -> None:
    state: Any = advance(fresh(Averaged()), 0, FORK).state_dict()
    assert digest(state["extra"]) != digest(state["model"])


def test_a_class_and_a_function_have_the_weights_of_a_loop_written_by_hand() -> None:
    rekey(3, 0, Purpose.SETUP)
    x, y = samples()
    model = network()
    optimizer = sgd(model.parameters(), hp_at(0))
    order, position = SampleOrder(len(x)), 0
    for step in range(STEPS):
        hp = hp_at(step)
        optimizer.param_groups[0]["lr"] = hp["lr"]
        rekey(3, step)
        batch = order.take(3, position, hp["batch_size"])
        position += len(batch)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    by_hand = digest(dict(model.state_dict()))
    one: Any = advance(fresh(Small()), 0, STEPS).state_dict()
    other: Any = advance(fresh(ordinary_loop), 0, STEPS).state_dict()
    assert digest(one["model"]) == by_hand
    assert digest({k.removeprefix("model."): v for k, v in other["captured"]["values"].items()}) == by_hand
