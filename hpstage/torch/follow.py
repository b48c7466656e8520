"""Optimizers that follow schedules: fields of param groups named like a hyperparameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hpstage.errors import StateError, UsageError
from hpstage.schedule import Scalar

Group = dict[str, Any]


def group_values(group: Group, hp: Mapping[str, Scalar]) -> dict[str, Any]:
    """Return the fields of a param group named like a hyperparameter (``betas`` from ``beta1`` and ``beta2``)."""
    values: dict[str, Any] = {name: hp[name] for name in group if name in hp and name != "params"}
    if "betas" in group and ("beta1" in hp or "beta2" in hp):
        beta1, beta2 = group["betas"]
        values["betas"] = (hp.get("beta1", beta1), hp.get("beta2", beta2))
    return values


class Follower:
    """Updates an optimizer's param groups to the present values.

    Args:
        optimizer: the optimizer as the user has just built it under ``hp``.
        hp: the values at step 0.
        values: returns the values of a group's fields under ``hp``. With the default, :func:`group_values`, the groups
            must have been built with these values: it is unknown whether a group built with ``0.1 * lr``, or without
            weight decay, should keep that.

    Raises:
        UsageError: with the default, a group was built with another value.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        hp: Mapping[str, Scalar],
        values: Callable[[Group, Mapping[str, Scalar]], Mapping[str, Any]] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._plain = values is None
        self._values = values or group_values
        self._applied: dict[str, Scalar] | None = None
        self._followed: list[tuple[Group, list[tuple[str, Any, int]]]] = []  # field, value and version when set
        for index, group in enumerate(optimizer.param_groups):
            self._agrees(index, group, hp, "built", "at first")

    def _agrees(self, index: int, group: Group, hp: Mapping[str, Scalar], made: str, when: str) -> None:
        if not self._plain:
            return
        for name, value in group_values(group, hp).items():
            if not agree(group[name], value):
                raise UsageError(
                    f"param group {index} of {type(self._optimizer).__name__} was {made} with {name}="
                    f"{plain(group[name])!r}, but the hyperparameter {name!r} is {value!r} {when}, and the group "
                    f"would follow it. Make the group with that value, or (TorchTrainable) override group_values(), "
                    f"or give the hyperparameter another name"
                )

    def apply(self, hp: Mapping[str, Scalar]) -> None:
        """Set the groups' fields, after :meth:`check`. Cheap if their values stay the same."""
        self.check()
        groups = self._optimizer.param_groups
        # With other `values`, fields may depend on more than `hp`.
        if self._plain and hp == self._applied and len(groups) == len(self._followed):
            return
        self._applied = dict(hp)
        self._followed = []
        for group in groups:
            fields = []
            for name, value in self._values(group, hp).items():
                put(group, name, value)
                fields.append((name, group[name], _version(group[name])))
            self._followed.append((group, fields))

    def check(self) -> None:
        """Check that param groups have the values of the last :meth:`apply`. Otherwise their values at the next step
        would depend on where training was cut.

        Raises:
            StateError: something else changed a field that follows a schedule.
            UsageError: a group was added with a value that differs from its schedule's.
        """
        if self._applied is None:
            return
        known = {id(group): fields for group, fields in self._followed}
        for index, group in enumerate(self._optimizer.param_groups):
            if id(group) not in known:
                if index >= len(self._followed):  # else load_state_dict() of the optimizer replaced a group
                    self._agrees(index, group, self._applied, "added", "in this step")
                continue
            for name, value, version in known[id(group)]:
                found = group.get(name)
                if found is value and _version(found) == version:
                    continue
                if not agree(found, value) or _version(found) != version:
                    raise StateError(
                        f"{name} of param group {index} follows the hyperparameter of that name and was "
                        f"{plain(value)!r} in this step, but something else (a learning rate scheduler?) has set it to "
                        f"{plain(found)!r}. Let only one of them set it: give the hyperparameter another name, "
                        f"override group_values(), or put all changes into the trial's schedule"
                    )

    def forget(self) -> None:
        """Allow arbitrary values in the groups again, after a state was loaded."""
        self._applied = None
        self._followed = []


def _version(field: Any) -> int:
    return field._version if isinstance(field, torch.Tensor) else 0


def put(group: Group, name: str, value: Any) -> None:
    field = group.get(name)
    if isinstance(field, torch.Tensor) and not isinstance(value, torch.Tensor):
        field.fill_(value)  # in place: compiled and capturable optimizers hold on to the tensor
    elif type(field) is float and type(value) is int:
        group[name] = float(value)
    else:
        group[name] = value


def agree(field: Any, value: Any) -> bool:
    if isinstance(field, torch.Tensor):
        return bool(field == torch.as_tensor(value, dtype=field.dtype))
    if isinstance(field, tuple | list):
        return tuple(field) == tuple(value)
    return bool(field == value)


def plain(field: Any) -> Any:
    """Return a field of a param group as a number."""
    return field.item() if isinstance(field, torch.Tensor) else field
