"""The generators of the process are seeded before each use, so that no state and no comparison is about them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.stats
import torch
from torch import nn

from hpstage.checkpoints.state_tree import digest, reread
from hpstage.execution.verification import portrait_of
from tests.torch.trainables import FORK, STEPS, Small, advance, fresh, hp_at, outcome


class Drawing(Small):
    """It holds them by functions, as an object of a library does, and by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = random.random, np.random.random
        self.noise = scipy.stats.norm(0.0, 1.0)
        self.generator = torch.default_generator

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        extra = sum(draw() for draw in self.draws) + float(self.noise.rvs())
        return super().loss(model, batch) + extra * torch.rand((), generator=self.generator)

    def evaluate(self, model: nn.Module) -> Mapping[str, float]:
        return {**super().evaluate(model), "drawn": float(self.noise.rvs())}


def test_an_evaluation_that_draws_from_global_generators_does_not_change_the_state() -> None:
    trainable: Any = advance(fresh(Drawing()), 0, FORK)
    before = portrait_of(trainable)
    trainable.evaluate()
    assert portrait_of(trainable) == before


def test_a_fork_draws_the_random_numbers_of_training_straight_through() -> None:
    expected = outcome(advance(fresh(Drawing()), 0, STEPS))
    first: Any = advance(fresh(Drawing()), 0, FORK)
    first.evaluate()
    state = reread(first.state_dict())
    forked: Any = fresh(Drawing(), hp_at(0))
    forked.load_state_dict(state)
    assert digest(forked.state_dict()) == digest(state)
    assert outcome(advance(forked, FORK, STEPS)) == expected
