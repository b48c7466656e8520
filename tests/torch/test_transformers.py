"""A Hugging Face Trainer under hpstage trains as it does alone, bit for bit, and forks at any step."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpstage import schedule as s
from hpstage.checkpoints import FolderCheckpoints
from hpstage.checkpoints.state_tree import clone
from hpstage.plan.facts import StateKey
from hpstage.testing import TrainableContract

pytest.importorskip("transformers")

from transformers import Trainer

from tests.torch.hugging_face import (
    CASES,
    ELSEWHERE,
    FORK,
    STEPS,
    alone,
    arguments,
    fresh,
    outcome,
    setup,
    trained,
    weights,
    without_dropout,
)

pytestmark = pytest.mark.sampled(10)

# --- the same as Trainer alone


@pytest.mark.ci
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_weights_equal_those_of_transformers_trainer(name: str) -> None:
    here = trained(fresh(CASES[name](), {"seed": 42}), lambda step: {"seed": 42}, 0, STEPS)
    expected = alone(CASES[name](), 42)
    found = weights(here)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.ci
def test_epochs_equal_those_of_transformers_trainer() -> None:
    """In epochs the last batch, and the last accumulation, are short. (Randomness is keyed once in an epoch.)"""
    args = arguments(gradient_accumulation_steps=2, max_steps=-1, num_train_epochs=2, weight_decay=0.1)
    here = setup(args=args, model_init=without_dropout)
    here.step_unit = "epoch"
    adapter = trained(fresh(here, {"seed": 42}), lambda step: {"seed": 42}, 0, 2)
    expected = alone(setup(args=args, model_init=without_dropout), 42, by_epoch=True)
    assert here.trainer.state.global_step == 8 and here.trainer.state.epoch == 2.0
    assert all(torch.equal(weights(adapter)[name], value) for name, value in expected.items())


class Decaying(Trainer):
    """Has a scheduler of its own, whatever its arguments say."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        optimizer = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return self.lr_scheduler


def decaying(**given: Any) -> Trainer:
    return Decaying(**given)


def test_trainer_class_may_be_a_function_that_returns_a_trainer() -> None:
    hp = {"seed": 42, "learning_rate": 2e-3}
    one, other = (
        weights(trained(fresh(setup(args=arguments(), trainer_class=make), hp), lambda step: hp, 0, STEPS))
        for make in (Decaying, decaying)
    )
    assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(
    ("stated", "given"),
    [
        ({"lr_scheduler_type": "cosine", "warmup_steps": 3}, {}),
        ({"lr_scheduler_type": "linear"}, {}),
        ({}, {"trainer_class": Decaying}),
    ],
)
def test_a_scheduler_starts_from_the_hyperparameter_learning_rate_as_in_transformers(
    stated: dict[str, Any], given: dict[str, Any]
) -> None:
    hp = {"seed": 42, "learning_rate": 2e-3}
    adapter = trained(fresh(setup(args=arguments(**stated), **given), hp), lambda step: hp, 0, STEPS)
    expected = alone(setup(args=arguments(**stated, learning_rate=2e-3), **given), 42)
    assert all(torch.equal(weights(adapter)[name], value) for name, value in expected.items())


@pytest.mark.ci
def test_a_schedule_of_the_learning_rate_is_followed_at_every_step() -> None:
    rates = s.linear(2e-3, start_factor=0.0, end_factor=1.0, total_iters=5)
    hp_at = lambda step: {"seed": 42, "learning_rate": rates.value(step)}  # noqa: E731
    adapter = trained(fresh(setup(), hp_at(0)), hp_at, 0, STEPS)
    expected = alone(setup(), 42, lambda step: float(rates.value(step)))
    assert all(torch.equal(weights(adapter)[name], value) for name, value in expected.items())


# --- forks


def hp_at(step: int) -> dict[str, Any]:
    """Everything that may change at a step does, before and after the fork."""
    return {
        "seed": 3,
        "learning_rate": 1e-2 / (1 + step),
        "weight_decay": 0.1 if step < 5 else 0.02,
        "adam_beta1": 0.9 if step < 6 else 0.8,
        "adam_epsilon": 1e-8 if step < 2 else 1e-6,
        "per_device_train_batch_size": 3 if step < 3 else 4,
        "gradient_accumulation_steps": 1 if step < 5 else 2,
        "max_grad_norm": 1 if step < 6 else 0.05,
        "label_smoothing_factor": 0 if step < 3 else 0.1,
    }


class TestTrainerAsTrainable(TrainableContract):
    steps, fork = STEPS, FORK

    @pytest.fixture
    def make_trainable(self) -> Callable[[], object]:
        return setup

    @pytest.fixture
    def values_at(self) -> Callable[[int], dict[str, Any]]:
        return hp_at


@functools.cache
def state_of(name: str) -> tuple[Any, list[object]]:
    """The state of a case at the fork, and what comes of it straight through."""
    adapter = trained(fresh(CASES[name](), {"seed": 42}), lambda step: {"seed": 42}, 0, FORK)
    state = clone(adapter.state_dict())
    straight = outcome(trained(adapter, lambda step: {"seed": 42}, FORK, STEPS))
    adapter.close()
    return state, straight


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_a_fork_equals_training_straight_through(name: str) -> None:
    state, straight = state_of(name)
    adapter = fresh(CASES[name](), {"seed": 42})
    adapter.load_state_dict(state)
    assert outcome(trained(adapter, lambda step: {"seed": 42}, FORK, STEPS)) == straight


@pytest.mark.slow  # half a minute of imports
def test_a_fork_in_a_new_process_equals_training_straight_through(tmp_path: Path) -> None:
    store = FolderCheckpoints(str(tmp_path), "tests")
    for number, name in enumerate(ELSEWHERE):
        store.save(StateKey(f"case-{number}"), state_of(name)[0], step=FORK, parent=None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch.test_transformers", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [state_of(name)[1] for name in ELSEWHERE]


def main(folder: str) -> None:
    torch.set_num_threads(1)
    store, found = FolderCheckpoints(folder, "tests"), []
    for number, name in enumerate(ELSEWHERE):
        adapter = fresh(CASES[name](), {"seed": 42})
        adapter.load_state_dict(store.load(StateKey(f"case-{number}")))
        found.append(outcome(trained(adapter, lambda step: {"seed": 42}, FORK, STEPS)))
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
