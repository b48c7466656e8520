"""SGD, Adam and AdamW on stacked parameters, in the order of operations of torch's single-tensor implementations.

All hyperparameters are numbers per member: tensors of shape (members, 1). What does not depend on tensors is computed
in Python, as torch does, and rounded once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hpstage.torch.backends.backend import NeedsPython
from hpstage.torch.backends.formulas import is_hooked

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
        """Return whether this is still the formula, with the group's present values."""

    @abstractmethod
    def numbers(self, group: Group, steps: int) -> Sequence[float]:
        """Return a member's numbers for the step that follows ``steps`` earlier ones."""

    @abstractmethod
    def step(self, weight: Tensor, gradient: Tensor, state: Sequence[Tensor], numbers: Sequence[Tensor]) -> None:
        """Step in place. ``gradient`` may be overwritten; all tensors are of shape (members, elements)."""


@dataclass(frozen=True)
class SGD(Formula):
    """https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html"""

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
        kept, added = (momentum, 1 - dampening) if steps else (0.0, 1.0)  # the first gradient is the buffer
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
    """https://docs.pytorch.org/docs/stable/generated/torch.optim.Adam.html, and AdamW, whose decay is decoupled."""

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
    """Return the formula of a param group. Two members can be stacked if theirs are equal.

    Raises:
        NeedsPython: there is none for this optimizer, or for one of its options.
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
    raise NeedsPython(f"{name} has no stacked form: SGD, Adam and AdamW do")
