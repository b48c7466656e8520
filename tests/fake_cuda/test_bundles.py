"""Bundles on devices: stacked siblings and virtual nodes, with the values of one trial, whatever memory does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints.state_tree import reread
from hpstage.errors import DeviceFull
from hpstage.torch.backends.siblings import StackedLoop
from hpstage.torch.backends.stacked.stack import DeviceMemory
from tests.bundled import Unmeasured
from tests.fake_cuda.plugin import fake
from tests.torch.trainables import Small, fresh, hp_at, outcome, samples

LATES = [0.1, 0.01, 0.001]


class Stacked(Small):
    numerics = "stacked"
    device = "cuda"
    max_stacked = 3

    def evaluate(self, model: Any) -> dict[str, float]:
        x, y = samples()
        return {"accuracy": (model(x).argmax(1) == y).float().mean().item(), "mean": model(x).mean().item()}


class Alone(Stacked):
    max_stacked = 1


class Nodes(Stacked):
    numerics = "eager"
    virtual_nodes = 2


class Siblings:
    """Three slots, each with a learning rate of its own."""

    def __init__(self) -> None:
        made = fresh(Stacked())
        assert isinstance(made, StackedLoop)
        self.first = made
        self.slots: list[Any] = list(made.members())
        for index, slot in enumerate(self.slots):
            slot.setup(self.hp(index))

    @staticmethod
    def hp(index: int) -> dict[str, Any]:
        return {**hp_at(0), "lr": LATES[index]}

    def step(self, step: int, due: Collection[int] = range(3)) -> dict[int, Exception]:
        """Train a step of these slots; return what it has raised, by slot."""
        failed: dict[int, Exception] = {}
        self.first.train_together({index: (step, self.hp(index)) for index in due})
        for index in due:
            try:
                self.slots[index].train(step, self.hp(index))
            except Exception as error:
                failed[index] = error
        return failed

    def states(self) -> list[object]:
        return [reread(slot.state_dict()) for slot in self.slots]

    def load(self, states: list[object], which: Collection[int] = range(3)) -> None:
        for index in which:
            self.slots[index].load_state_dict(states[index])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("due", [range(3), [0, 2], [0, 1]])
def test_a_stacked_step_retried_after_a_memory_error_has_the_bits_of_an_undisturbed_step(
    due: Collection[int],
) -> None:
    """At any allocation: where a slot leaves or joins a bundle, or in the middle of a step that changes weights."""
    siblings = Siblings()
    for step in range(3):
        assert siblings.step(step) == {}
    states = siblings.states()
    siblings.step(3, due)
    expected = [outcome(slot) for slot in siblings.slots]
    for number in range(1, 1000, 3):
        siblings.load(states)
        siblings.step(2)
        siblings.load(states, [0])  # it joins again
        siblings.step(2, [1, 2])
        siblings.load(states, [1, 2])
        siblings.first.stack.memory = DeviceMemory("Stacked")
        fake.fail_at(0, number)
        before = fake.allocations(0)
        failed = siblings.step(3, due)
        has_run_out = fake.allocations(0) - before >= number
        fake.fail_at(0, 0)
        assert {type(error) for error in failed.values()} <= {DeviceFull}
        siblings.load(states, failed)
        assert siblings.step(3, failed) == {}
        assert [outcome(slot) for slot in siblings.slots] == expected, number
        if not has_run_out:
            break
    assert 50 < number < 500


def test_stacked_models_train_one_at_a_time_after_memory_has_run_out_twice(caplog: pytest.LogCaptureFixture) -> None:
    siblings = Siblings()
    siblings.step(0)
    states, widths = siblings.states(), []
    for _ in range(2):
        fake.fail_at(0, 60)
        assert [type(error) for error in siblings.step(1).values()] == [DeviceFull] * 3
        siblings.load(states)
        assert siblings.step(1) == {}
        widths.append(siblings.slots[0].width)
        siblings.load(states)
    assert widths == [3, 1]
    assert "The memory of the device is short: models of Stacked are trained one at a time." in caplog.text
    fake.fail_at(0, 60)
    assert {type(error) for error in siblings.step(1).values()} == {torch.OutOfMemoryError}


def searched(subject: Small, store: Path, lates: list[float]) -> list[tuple[float, str, Any]]:
    def space(trial: optuna.Trial) -> Mapping[str, Any]:
        late = trial.suggest_categorical("late", lates)
        return {"lr": s.piecewise({0: 0.05, 4: late}), "momentum": 0.9, "batch_size": 8}

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler({"late": lates}, seed=0))
    hpstage.optimize(
        study,
        subject,
        space,
        metric="mean",
        steps=8,
        n_trials=len(lates),
        executor=Unmeasured(),
        store=store,
    )
    return sorted((trial.params["late"], trial.state.name, trial.values) for trial in study.trials)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[float, str, Any]], int]:
    """What a search of stacked siblings finds that runs out of nothing, and the number of its allocations."""
    before = fake.allocations(0)
    found = searched(Stacked(), tmp_path_factory.mktemp("straight"), LATES)
    assert [state for _, state, _ in found] == ["COMPLETE"] * 3
    return found, fake.allocations(0) - before


@pytest.mark.one_in(3)
@pytest.mark.parametrize("share", [0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95])
def test_running_out_of_device_memory_does_not_change_a_search_with_stacked_trials(
    share: float, straight: tuple[list[tuple[float, str, Any]], int], tmp_path: Path
) -> None:
    expected, allocations = straight
    fake.fail_at(0, int(share * allocations))
    assert searched(Stacked(), tmp_path / "short", LATES) == expected


@pytest.mark.parametrize(("kind", "alone"), [(Stacked, Alone), (Nodes, Nodes)])
def test_trials_trained_in_a_bundle_have_the_values_of_separate_searches(kind: Any, alone: Any, tmp_path: Path) -> None:
    together = searched(kind(), tmp_path / "all", LATES)
    assert [state for _, state, _ in together] == ["COMPLETE"] * 3
    assert together == sorted(searched(alone(), tmp_path / str(number), [late])[0] for number, late in enumerate(LATES))
