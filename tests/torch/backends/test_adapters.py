"""Adapters that differ in rank or alpha train in one process: those that take the same step as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from hpstage.checkpoints.state_tree import digest
from hpstage.training.trainables import as_trainable
from hpstage.workloads.fine_tuning import LoRA
from tests.torch.backends.test_frozen_memory import Frozen, memory, model_of

pytestmark = pytest.mark.sampled(3)


class Adapters(Frozen):
    """A frozen backbone whose layers have adapters with alpha as a Python number."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        made: Any = super().model(hp)
        for place in (0, 2):
            made[0][place] = self.adapter(LoRA(made[0][place], hp["rank"], hp["alpha"]))
        return made  # type: ignore[no-any-return]

    def adapter(self, made: LoRA) -> nn.Module:
        return made


class WithTensors(Adapters):
    def adapter(self, made: Any) -> nn.Module:
        scale = torch.tensor(made.scale)
        del made.scale
        made.register_buffer("scale", scale)
        return made  # type: ignore[no-any-return]


def trained(subject: Adapters, trials: list[dict[str, Any]]) -> tuple[list[Any], list[int]]:
    """Train a step of each trial in a slot of one process; return the slots, and as how many each was trained."""
    subject.max_stacked = len(trials)
    loop: Any = as_trainable(subject)
    slots = list(loop.members())
    for slot, hp in zip(slots, trials, strict=True):
        slot.setup(hp)
    widths = loop.train_together({index: (0, hp) for index, hp in enumerate(trials)})
    for slot, hp in zip(slots, trials, strict=True):
        slot.train(0, hp)
    return slots, [widths[index] for index in range(len(trials))]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "name", "values", "width"),
    [
        (Adapters, "lr", [0.01, 0.02, 0.03, 0.04], 4),
        (Adapters, "rank", [4, 8, 4, 8], 2),
        (Adapters, "alpha", [8, 16, 8, 16], 2),
        (WithTensors, "alpha", [8, 16, 8, 16], 4),
    ],
)
def test_trials_whose_adapters_run_the_same_operations_are_stacked(
    kind: type[Adapters], name: str, values: list[float], width: int
) -> None:
    trials = [{"lr": 0.01, "rank": 4, "alpha": 8, name: value} for value in values]
    slots, widths = trained(kind(), trials)
    assert widths == [width] * 4
    models = [model_of(slot) for slot in slots]
    frozen = memory([models[0][0][0].base, models[0][0][2].base])
    assert memory(models) < 1.8 * frozen  # with the adapters of all
    for slot, hp in zip(slots, trials, strict=True):
        (alone,), _ = trained(kind(), [hp])
        assert digest(slot.state_dict()) == digest(alone.state_dict())


@pytest.mark.ci
def test_a_trial_that_joins_is_stacked_with_trials_whose_adapters_run_the_same_operations() -> None:
    trials = [{"lr": 0.01, "rank": 4, "alpha": alpha} for alpha in (8, 16, 16)]
    slots, widths = trained(Adapters(), trials)
    assert widths == [1, 2, 2]
    slots[2].setup(joins := {"lr": 0.02, "rank": 4, "alpha": 8})
    due = {0: (1, trials[0]), 1: (1, trials[1]), 2: (0, joins)}
    assert slots[0].stack.first.train_together(due) == {0: 2, 1: 1, 2: 2}
    for index, (step, hp) in due.items():
        slots[index].train(step, hp)
    (alone,), _ = trained(Adapters(), [joins])
    assert digest(slots[2].state_dict()) == digest(alone.state_dict())
