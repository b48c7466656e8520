"""The formulas of torch's optimizers as functions of tensors, for steps that are compiled as a whole.

Values such as the learning rate are tensors, too: compiled code then does not depend on them. Whether there is momentum
or weight decay at all is a flag, since the operations differ without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Group(NamedTuple):
    """A param group as the arguments of compiled code.

    Attributes:
        rule: name of the formula, ``"sgd"`` or ``"adam"``.
        flags: which parts of the formula apply, see :func:`_sgd` and :func:`_adam`.
        params: the parameters that require gradients.
        state: lists of one tensor per parameter, in the formula's order.
        values: 0-dimensional float64 tensors, in the formula's order.
    """

    rule: str
    flags: tuple[bool, ...]
    params: list[Tensor]
    state: tuple[list[Tensor], ...]
    values: tuple[Tensor, ...]


def has_formula(optimizer: torch.optim.Optimizer, *, static: bool = False) -> bool:
    """Return whether :class:`Formula` does all that ``optimizer.step()`` would do.

    Args:
        static: see :class:`Formula`. If true, param groups with ``capturable`` have a formula, too.
    """
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        return False
    if is_hooked(optimizer):
        return False
    for group in optimizer.param_groups:
        if group.get("amsgrad") or group.get("differentiable"):
            return False
        if group.get("capturable") and not static:
            return False
        if group.get("dampening") and group.get("momentum"):
            return False  # its first step has another formula
        if not group["params"] or any(param.is_complex() for param in group["params"]):
            return False
    return True


def is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer.step()`` does more than its class defines: it has hooks, there are hooks for all
    optimizers, or it is wrapped, for example by a learning rate scheduler of torch's."""
    of_all = vars(sys.modules["torch.optim.optimizer"])
    return (
        bool(vars(optimizer).keys() & {"step", "zero_grad"})
        or any(vars(optimizer).get(name) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))
        or any(of_all.get(name) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"))
    )


class Formula:
    """The formula of one optimizer, and the tensors that hold the present values of its param groups.

    Args:
        static: whether the optimizer's state must stay in the same tensors, each on its parameter's device. A loaded
            state is then copied into them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, static: bool = False) -> None:
        self.optimizer = optimizer
        self._static = static
        self._places: dict[tuple[Tensor, str], Tensor] = {}
        self._rule = "sgd" if type(optimizer) is torch.optim.SGD else "adam"
        self._values: list[list[Tensor]] = []

    def groups(self) -> list[Group]:
        """Return the param groups with their present values. Missing state is created as torch would create it."""
        make = self._sgd_group if self._rule == "sgd" else self._adam_group
        return [make(number, group) for number, group in enumerate(self.optimizer.param_groups)]

    def _tensors(self, number: int, device: torch.device, *values: Any) -> tuple[Tensor, ...]:
        """Return values of a group as tensors, the same tensors at each call."""
        while len(self._values) <= number:
            self._values.append([torch.zeros((), dtype=torch.float64, device=device) for _ in values])
        for tensor, value in zip(self._values[number], values, strict=True):
            if isinstance(value, Tensor):
                tensor.copy_(value)
            else:
                tensor.fill_(value)
        return tuple(self._values[number])

    def _held(self, param: Tensor, name: str) -> Tensor:
        """Return an entry of the optimizer's state for a parameter; if static, in the same tensor at each call."""
        held = self.optimizer.state[param]
        present: Tensor = held[name]
        if not self._static:
            return present
        place = self._places.get((param, name))
        if place is present:
            return present
        if place is None or (place.shape, place.dtype, place.stride()) != (
            present.shape,
            present.dtype,
            present.stride(),
        ):
            self._places[param, name] = place = present.to(param.device)  # a step may have been counted on the CPU
        else:
            place.copy_(present)
        held[name] = place
        return place

    def _sgd_group(self, number: int, group: dict[str, Any]) -> Group:
        params = [param for param in group["params"] if param.requires_grad]
        flags = (bool(group["momentum"]), bool(group["weight_decay"]), group["nesterov"], group["maximize"])
        buffers = []
        for param in params if flags[0] else ():
            held = self.optimizer.state[param]
            if held.get("momentum_buffer") is None:
                held["momentum_buffer"] = torch.zeros_like(param)
            buffers.append(self._held(param, "momentum_buffer"))
        device = group["params"][0].device
        values = self._tensors(number, device, group["lr"], group["momentum"], group["weight_decay"])
        return Group("sgd", flags, params, (buffers,), values)

    def _adam_group(self, number: int, group: dict[str, Any]) -> Group:
        params = [param for param in group["params"] if param.requires_grad]
        decoupled = bool(group.get("decoupled_weight_decay", type(self.optimizer) is torch.optim.AdamW))
        state: tuple[list[Tensor], ...] = ([], [], [])
        for param in params:
            held = self.optimizer.state[param]
            if not held:
                on_device = group.get("fused") or group.get("capturable")  # as in torch
                held["step"] = torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu")
                held["exp_avg"] = torch.zeros_like(param)
                held["exp_avg_sq"] = torch.zeros_like(param)
            for tensors, name in zip(state, ("step", "exp_avg", "exp_avg_sq"), strict=True):
                tensors.append(self._held(param, name))
        values = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        device = group["params"][0].device
        flags = (decoupled, bool(group["weight_decay"]), group["maximize"])
        return Group("adam", flags, params, state, self._tensors(number, device, *values))


def apply(groups: Sequence[Group], gradients: Sequence[Tensor | None]) -> None:
    """Update all parameters and the optimizer's state in place.

    Args:
        gradients: one for each parameter of the groups, in order; ``None`` leaves the parameter as it is.
    """
    at = 0
    for group in groups:
        formula = _sgd if group.rule == "sgd" else _adam
        for number, param in enumerate(group.params):
            gradient = gradients[at]
            at += 1
            if gradient is not None:
                state = [tensors[number] for tensors in group.state if tensors]
                formula(param, gradient, state, group.values, group.flags)


def _sgd(param: Tensor, gradient: Tensor, state: list[Tensor], values: Sequence[Tensor], flags: Sequence[bool]) -> None:
    lr, momentum, decay = values
    has_momentum, has_decay, nesterov, maximize = flags
    if maximize:
        gradient = -gradient
    if has_decay:
        gradient = gradient + decay * param
    if has_momentum:
        [buffer] = state
        buffer.copy_(momentum * buffer + gradient)
        gradient = gradient + momentum * buffer if nesterov else buffer
    param.copy_(param - lr * gradient)


def _adam(
    param: Tensor, gradient: Tensor, state: list[Tensor], values: Sequence[Tensor], flags: Sequence[bool]
) -> None:
    lr, beta1, beta2, eps, decay = values
    decoupled, has_decay, maximize = flags
    step, mean, square = state
    if maximize:
        gradient = -gradient
    step.add_(1)
    if has_decay and decoupled:
        param.copy_(param * (1 - lr * decay))
    elif has_decay:
        gradient = gradient + decay * param
    mean.copy_(beta1 * mean + (1 - beta1) * gradient)
    square.copy_(beta2 * square + (1 - beta2) * gradient * gradient)
    taken = step.to(lr.device, lr.dtype)
    scale = (1 - beta2**taken).sqrt()
    param.copy_(param - lr / (1 - beta1**taken) * mean / (square.sqrt() / scale + eps))
