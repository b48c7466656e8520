"""SGD, Adam and AdamW on stacked parameters, in the order of operations of torch's single-tensor implementations.

For each param group, the parameters of all members are in one tensor, and so is each kind of state.

Hyperparameters are tensors of shape (members, 1). Numbers that do not depend on tensors are computed in Python, as in
torch, and rounded once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hpstage.torch.backends.backend import NeedsPython
from hpstage.torch.backends.formulas import is_hooked
from hpstage.torch.backends.stacked.planning import VECTOR

Group = Mapping[str, Any]


class Formula(ABC):
    """The update rule of one param group of an optimizer."""

    counts: ClassVar[bool]
    """Whether the state counts steps."""

    @property
    @abstractmethod
    def state(self) -> tuple[str, ...]:
        """Tensors of the optimizer's state that have the shape of their parameter."""

    @abstractmethod
    def fits(self, group: Group) -> bool:
        """Return whether this formula still applies, with the group's present values."""

    @abstractmethod
    def numbers(self, group: Group, steps: int) -> Sequence[float]:
        """Return a member's numbers for the step that follows ``steps`` earlier ones."""

    @abstractmethod
    def step(self, weight: Tensor, gradient: Tensor, state: Sequence[Tensor], numbers: Sequence[Tensor]) -> None:
        """Step in place. ``gradient`` may be overwritten; all tensors are of shape (members, elements)."""


@dataclass(frozen=True)
class SGD(Formula):
    """SGD, see https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html"""

    momentum: bool
    nesterov: bool
    weight_decay: bool
    counts = False

    @property
    def state(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def fits(self, group: Group) -> bool:
        return bool(group["momentum"]) == self.momentum and bool(group["weight_decay"]) == self.weight_decay

    def numbers(self, group: Group, steps: int) -> Sequence[float]:
        momentum, dampening = float(group["momentum"]), float(group["dampening"])
        kept, added = (momentum, 1 - dampening) if steps else (0.0, 1.0)  # the first gradient becomes the buffer
        return -float(group["lr"]), float(group["weight_decay"]), kept, added, momentum

    def step(self, weight: Tensor, gradient: Tensor, state: Sequence[Tensor], numbers: Sequence[Tensor]) -> None:
        rate, decay, kept, added, momentum = numbers
        if self.weight_decay:
            gradient.addcmul_(weight, decay)
        if self.momentum:
            (buffer,) = state
            buffer.mul_(kept).addcmul_(gradient, added)
            gradient = gradient.addcmul_(buffer, momentum) if self.nesterov else buffer
        weight.addcmul_(gradient, rate)


@dataclass(frozen=True)
class Adam(Formula):
    """Adam, see https://docs.pytorch.org/docs/stable/generated/torch.optim.Adam.html, and AdamW (decoupled decay)."""

    weight_decay: bool
    decoupled: bool
    counts = True
    state = ("exp_avg", "exp_avg_sq")

    def fits(self, group: Group) -> bool:
        return bool(group["weight_decay"]) == self.weight_decay

    def numbers(self, group: Group, steps: int) -> Sequence[float]:
        lr, decay, (beta1, beta2) = float(group["lr"]), float(group["weight_decay"]), map(float, group["betas"])
        step = float(steps + 1)
        size = lr / (1 - beta1**step)
        root = (1 - beta2**step) ** 0.5
        return (
            -size,
            1 - lr * decay if self.decoupled else decay,
            1 - beta1,
            beta2,
            1 - beta2,
            root,
            float(group["eps"]),
        )

    def step(self, weight: Tensor, gradient: Tensor, state: Sequence[Tensor], numbers: Sequence[Tensor]) -> None:
        size, decay, to_first, beta2, to_second, root, eps = numbers
        first, second = state
        if self.weight_decay and self.decoupled:
            weight.mul_(decay)
        elif self.weight_decay:
            gradient.addcmul_(weight, decay)
        first.lerp_(gradient, to_first)
        second.mul_(beta2).addcmul_(gradient * to_second, gradient)
        denominator = second.sqrt().div_(root).add_(eps)
        weight.addcdiv_(first * size, denominator)


def formula_of(optimizer: torch.optim.Optimizer, group: Group) -> Formula:
    """Return the formula of a param group. Two members can be stacked if their formulas are equal.

    Raises:
        NeedsPython: there is no formula for this optimizer, or for one of its options.
    """
    name = type(optimizer).__name__
    for option in ("amsgrad", "maximize", "differentiable"):
        if group.get(option):
            raise NeedsPython(f"{name} with {option}=True has no stacked form")
    if is_hooked(optimizer):
        raise NeedsPython(f"{name}.step() has hooks or is wrapped, which a stack would not call")
    decays = bool(group.get("weight_decay"))
    if type(optimizer) is torch.optim.SGD:
        return SGD(momentum=bool(group["momentum"]), nesterov=bool(group["nesterov"]), weight_decay=decays)
    if type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = type(optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
        return Adam(weight_decay=decays, decoupled=decoupled)
    raise NeedsPython(f"{name} has no stacked form; SGD, Adam and AdamW have one")


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
        """Return the tensors with a member in a new last slot. ``state`` has, for each name in ``Formula.state``, the
        tensors by parameter, or None if there are none yet."""
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
