"""Optimizers that follow schedules: fields of param groups named like a hyper-parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hpstage.errors import UsageError
from hpstage.schedule import Scalar

Group = dict[str, Any]


def group_values(group: Group, hp: Mapping[str, Scalar]) -> dict[str, Any]:
    """The fields of a param group that are named like a hyper-parameter (``betas`` after ``beta1``, ``beta2``)."""
    values: dict[str, Any] = {name: hp[name] for name in group if name in hp and name != "params"}
    if "betas" in group and ("beta1" in hp or "beta2" in hp):
        beta1, beta2 = group["betas"]
        values["betas"] = (hp.get("beta1", beta1), hp.get("beta2", beta2))
    return values


class Follower:
    """Brings an optimizer's param groups to the present values.

    Args:
        optimizer: as the user has just built it, under ``hp``.
        hp: the values at step 0.
        values: which fields of a group have which value under ``hp``; default :func:`group_values`, and then
            the groups must have been built with them. Raises :class:`UsageError` if one was not: it is not known
            whether a group built with ``0.1 * lr``, or without weight decay, is to keep that.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        hp: Mapping[str, Scalar],
        values: Callable[[Group, Mapping[str, Scalar]], Mapping[str, Any]] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._values = values or group_values
        self._applied: dict[str, Scalar] | None = None
        if values is None:
            for index, group in enumerate(optimizer.param_groups):
                for name, value in group_values(group, hp).items():
                    if not _agree(group[name], value):
                        raise UsageError(
                            f"param group {index} of {type(optimizer).__name__} was built with {name}="
                            f"{_plain(group[name])!r}, but the hyper-parameter {name!r} is {value!r} at step 0 and the "
                            "group would follow it: build the group with that value, or override group_values() of "
                            "the TorchTrainable, or give the hyper-parameter a name of its own"
                        )

    def apply(self, hp: Mapping[str, Scalar]) -> None:
        """Set the groups' fields; free of cost where nothing has changed since the last call."""
        if hp == self._applied:
            return
        self._applied = dict(hp)
        for group in self._optimizer.param_groups:
            for name, value in self._values(group, hp).items():
                _set(group, name, value)

    def forget(self) -> None:
        """The groups may hold anything again (a state was loaded)."""
        self._applied = None


def _set(group: Group, name: str, value: Any) -> None:
    field = group.get(name)
    if isinstance(field, torch.Tensor) and not isinstance(value, torch.Tensor):
        field.fill_(value)  # in place: compiled and capturable optimizers hold on to the tensor
    elif type(field) is float and type(value) is int:
        group[name] = float(value)
    else:
        group[name] = value


def _agree(field: Any, value: Any) -> bool:
    if isinstance(field, torch.Tensor):
        return bool(field == torch.tensor(value, dtype=field.dtype))
    if isinstance(field, tuple | list):
        return tuple(field) == tuple(value)
    return bool(field == value)


def _plain(field: Any) -> Any:
    return field.item() if isinstance(field, torch.Tensor) else field
