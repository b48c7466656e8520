"""What can be done on all members at once does not depend on the values at which it is planned."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from hpstage.torch.backends.stacked.planning import plan
from hpstage.torch.backends.stacked.streams import Streams
from hpstage.torch.backends.stacked.tracing import probe
from tests.torch.backends.siblings import CPU, Hp, Sibling, builder, hp_of

MEMBERS = 3


class Dilated(Sibling):
    """A convolution of which several as groups of one have other bits than each alone."""

    fill: float | None = None

    def model(self, hp: Hp) -> nn.Module:
        torch.manual_seed(0)
        first = nn.Conv2d(3, 4, 3, padding=2, dilation=2)
        if self.fill is not None:
            nn.init.constant_(first.weight, self.fill)
        return nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(324, 5))

    def optimizer(self, model: nn.Module, hp: Hp) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"])

    def data(self, generator: torch.Generator, size: int) -> Any:
        return torch.randn(size, 3, 9, 9, generator=generator), torch.randint(5, (size,), generator=generator)


def done_at_once(subject: Sibling) -> set[str]:
    model = subject.model(hp_of(0, 0))
    batch = subject.data(torch.Generator().manual_seed(0), 1)
    trace = builder(subject).tracer.trace(model, subject.optimizer(model, hp_of(0, 0)), batch, hp_of(0, 0))
    own, generator = dict(model.named_parameters()), torch.Generator().manual_seed(0)
    example = [*(own[name].detach() for name in trace.trained), *batch]
    members = [probe(example, generator, len(trace.trained), len(batch), moved=True) for _ in range(MEMBERS)]
    streams = Streams(CPU, [torch.get_rng_state()] * MEMBERS)
    return {str(node) for node in plan(trace, members, streams).stacked}


@pytest.mark.parametrize("fill", [0.0, math.nan, math.inf])
def test_weights_that_are_zero_or_not_finite_give_the_stacking_plan_of_ordinary_weights(fill: float) -> None:
    """Of weights that are zero, or no longer numbers, the sums are the same in whatever order."""
    special = Dilated()
    special.fill = fill
    assert done_at_once(special) == done_at_once(Dilated())
