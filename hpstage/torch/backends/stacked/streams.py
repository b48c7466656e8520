"""Random numbers of members: each member draws what it would draw without the others. They are seeded in each step as
:mod:`hpstage.training.randomness` describes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Streams:
    """The states of torch's generator for all members, in the order of their slots.

    Args:
        device: the device whose generator the operations draw from.
        states: that generator's state for each member.
    """

    def __init__(self, device: torch.device, states: Sequence[Tensor] = ()) -> None:
        self._generator = generator_of(device)
        self.states = list(states)

    def each(self, draw: Callable[[int], Any]) -> list[Any]:
        """Return ``draw(slot)`` for each slot; each draws from its member's stream."""
        generator, drawn = self._generator, []
        for slot, state in enumerate(self.states):
            generator.set_state(state)
            drawn.append(draw(slot))
            self.states[slot] = generator.get_state()
        return drawn

    def once(self, draw: Callable[[], Any]) -> Any:
        """Return what each member would draw. All members must be in one state."""
        self._generator.set_state(self.states[0])
        drawn = draw()
        self.states = [self._generator.get_state()] * len(self.states)
        return drawn


def generator_of(device: torch.device) -> Any:
    """Return the generator that operations on a device draw from by default."""
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # before, there are no generators
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
