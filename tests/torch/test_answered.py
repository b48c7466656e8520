"""What a user's own methods save and load is as they leave it, also where they make it again."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hpstage.checkpoints.state_tree import reread
from hpstage.training.run import Run
from tests.torch.loops import LATE, begun, made, stepped, trained
from tests.torch.trainables import FORK, STEPS, Small, advance, fresh, outcome


class Reading(Small):
    """An iterator that moves on, with a position of its own; nothing else of it changes."""

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        self.place: dict[str, Any] = {"numbers": itertools.count()}
        self.numbers = itertools.count()
        self.position = torch.zeros(())
        return super().model(hp)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        if not model.training:
            return loss
        self.position += 1
        return loss * (1 + 0.1 * next(self.numbers) + 0.1 * next(self.place["numbers"]))

    def extra_state(self) -> Any:
        return int(self.position)

    def load_extra_state(self, state: Any) -> None:
        self.numbers, self.place["numbers"] = itertools.count(state), itertools.count(state)


def test_an_iterator_continues_after_a_fork_at_the_position_set_by_load_extra_state() -> None:
    expected = outcome(advance(fresh(Reading()), 0, STEPS))
    state = reread(advance(fresh(Reading()), 0, FORK).state_dict())
    forked: Any = fresh(Reading())
    forked.load_state_dict(state)
    assert outcome(advance(forked, FORK, STEPS)) == expected
    forked.load_state_dict(state)
    assert outcome(advance(forked, FORK, STEPS)) == expected


class Reader:
    def __init__(self) -> None:
        self.numbers, self.position = itertools.count(), 0

    def next(self) -> int:
        self.position += 1
        return next(self.numbers)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
        self.numbers = itertools.count(self.position)


def reading(run: Run) -> None:
    reader = Reader()
    parts = begun(run, reader=reader)
    for _ in run.steps():
        stepped(run, parts, 0.1 * reader.next())


def test_an_attached_iterator_continues_after_a_fork_at_the_position_set_by_load_state_dict() -> None:
    expected = trained(reading, LATE + 3)
    first = trained(reading, LATE)
    forked = made(reading)
    forked.load_state_dict(reread(first.state_dict()))
    for step in range(LATE, LATE + 3):
        forked.train(step, {"lr": 0.1, "momentum": 0.9, "batch_size": 8})
    assert forked.evaluate() == expected.evaluate()
    for trainable in (expected, first, forked):
        trainable.close()
