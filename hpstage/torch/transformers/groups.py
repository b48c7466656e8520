"""The param groups that Trainer makes, and how their fields follow schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpstage.errors import UsageError
from hpstage.schedule import Scalar

Group = dict[str, Any]

_MULTIPLES = {"learning_rate": "lr", "weight_decay": "weight_decay"}
"""Hyperparameters, and the fields of groups that are multiples of them (0 for the weight decay of biases)."""
_FACTOR = "_factor"


def built(trainer: Any, hp: Mapping[str, Scalar]) -> torch.optim.Optimizer:
    """Return the optimizer that a Trainer creates. Its groups also contain the factors between hyperparameters and the
    fields that follow them.

    Raises:
        UsageError: the optimizer has no field for a hyperparameter, or the factor of a field is unknown.
    """
    args = trainer.args
    first = {name: getattr(args, name) for name in _MULTIPLES if name in hp}
    for name, value in first.items():
        setattr(args, name, value or 1.0)  # with 0, the factors could not be seen
    optimizer: torch.optim.Optimizer = trainer.create_optimizer()
    for name, value in first.items():
        field = _MULTIPLES[name]
        for group in optimizer.param_groups:
            if field not in group:
                raise _without(optimizer, name)
            group[field + _FACTOR] = _factor(name, group[field], getattr(args, name), first=value)
        setattr(args, name, value)
    for group in optimizer.param_groups:
        for name, field, kind in (("adam_beta1", "betas", tuple), ("adam_beta2", "betas", tuple), _EPSILON):
            if name in hp and type(group.get(field)) is not kind:
                raise _without(optimizer, name)
    return optimizer


_EPSILON = ("adam_epsilon", "eps", float)


def group_values(group: Group, hp: Mapping[str, Scalar]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, field in _MULTIPLES.items():
        if name in hp:
            values[field] = hp[name] * group[field + _FACTOR]
    if "adam_beta1" in hp or "adam_beta2" in hp:
        beta1, beta2 = group["betas"]
        values["betas"] = float(hp.get("adam_beta1", beta1)), float(hp.get("adam_beta2", beta2))
    if "adam_epsilon" in hp:
        values["eps"] = hp["adam_epsilon"]
    return values


def _factor(name: str, found: float, built_with: float, *, first: float) -> float:
    if found in (0.0, built_with):
        return float(found == built_with)
    if not first:
        raise UsageError(
            f"{name} is 0 at first, so the factors of the groups of create_optimizer() are unknown: a group has "
            f"{found!r} if {name} is {built_with}. Begin with another value"
        )
    return found / built_with


def _without(optimizer: torch.optim.Optimizer, name: str) -> UsageError:
    return UsageError(f"the hyperparameter {name!r} has no effect: {type(optimizer).__name__} has no such field")
