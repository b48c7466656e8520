"""The parameters and the optimizer's state of all members, in one tensor each for a param group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpstage.torch.backends.backend import NeedsPython
from hpstage.torch.backends.stacked.optimizers import Formula
from hpstage.torch.backends.stacked.planning import VECTOR


@dataclass(frozen=True)
class Place:
    """The position of a parameter in a member's row."""

    name: str
    shape: torch.Size
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


Rows = tuple[Tensor, list[Tensor]]
"""Weights and state of all members."""

_ALL = slice(None)


class FlatGroup:
    """A param group of all members: tensors of shape (members, elements).

    Every parameter begins at a multiple of :data:`VECTOR` elements, and so does every row. So a parameter has the same
    alignment in every slot, and no element is computed by the remainder of a vectorised loop.
    """

    def __init__(self, formula: Formula, parameters: Sequence[tuple[str, Tensor]]) -> None:
        self.formula = formula
        self.places: list[Place] = []
        size = 0
        for name, parameter in parameters:
            self.places.append(Place(name, parameter.shape, size))
            size += -(-parameter.numel() // VECTOR) * VECTOR
        example = parameters[0][1].detach()
        dtypes = {parameter.dtype for _, parameter in parameters}
        if dtypes not in ({torch.float32}, {torch.float64}):
            raise NeedsPython(f"a param group has parameters of {', '.join(sorted(map(str, dtypes)))}")
        self.weight = example.new_zeros((0, size))
        self.state = [example.new_zeros((0, size)) for _ in formula.state]
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        self._pads = [example.new_zeros(-(-place.numel // VECTOR) * VECTOR - place.numel) for place in self.places]

    def with_row(self, weights: Sequence[Tensor], state: Sequence[Sequence[Tensor] | None]) -> Rows:
        """Return the tensors with a member in a new last slot. ``state`` has tensors by parameter for each name of the
        formula's, or None where there are none yet."""
        weight = torch.cat([self.weight, self._row(weights)])
        zeros = self.weight.new_zeros((1, self.weight.shape[1]))
        return weight, [
            torch.cat([old, zeros if new is None else self._row(new)])
            for old, new in zip(self.state, state, strict=True)
        ]

    def without(self, slot: int) -> Rows:
        """Return the tensors without a member; those in later slots move up."""
        rest = [other for other in range(len(self.weight)) if other != slot]
        return self.weight[rest], [old[rest] for old in self.state]

    def take(self, rows: Rows) -> None:
        """Replace the tensors by those of other members."""
        self.weight, self.state = rows
        self._views.clear()

    def stacked(self, slots: slice = _ALL) -> list[Tensor]:
        """Return the parameters of the members in these slots, of shape (members, *shape), as views."""
        first, end, _ = slots.indices(len(self.weight))
        if (first, end) not in self._views:
            self._views[first, end] = [self._view(self.weight[slots], place) for place in self.places]
        return self._views[first, end]

    def of(self, slot: int, tensor: Tensor) -> list[Tensor]:
        """Return a member's part of :attr:`weight`, or of one of :attr:`state`, by parameter, as views."""
        return [self._view(tensor, place)[slot] for place in self.places]

    def step(self, gradients: Sequence[Tensor], numbers: Tensor, slots: slice = _ALL) -> None:
        """Step some members with gradients of shape (members, *shape) and numbers of shape (members, numbers)."""
        columns = numbers.to(self.weight.dtype).unsqueeze(2).unbind(1)
        self.formula.step(self.weight[slots], self._flat(gradients), [state[slots] for state in self.state], columns)

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        width = len(tensors[0])
        parts: list[Tensor] = []
        for tensor, pad in zip(tensors, self._pads, strict=True):
            parts.append(tensor.reshape(width, -1))
            if len(pad):
                parts.append(pad.expand(width, -1))
        return torch.cat(parts, 1)

    def _row(self, tensors: Sequence[Tensor]) -> Tensor:
        parts = [
            part for pair in zip(tensors, self._pads, strict=True) for part in (pair[0].detach().reshape(-1), pair[1])
        ]
        return torch.cat(parts).unsqueeze(0)

    def _view(self, tensor: Tensor, place: Place) -> Tensor:
        inner = torch.empty(place.shape, device="meta").stride()
        return tensor.as_strided(
            (len(tensor), *place.shape), (tensor.shape[1], *inner), tensor.storage_offset() + place.start
        )
