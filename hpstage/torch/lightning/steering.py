"""Hyper-parameters that change on the way steer the optimizers of ``configure_optimizers`` and ``self.hparams``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule

from hpstage.errors import StateError, UsageError
from hpstage.schedule import Scalar
from hpstage.torch.follow import agree, group_values, plain, put


class Steering:
    """Gives new values to param groups and ``hparams`` where they change.

    A value that never changes steers nothing: the module has been made with it, and its own schedulers go on from
    there. A field that a schedule has changed once is that schedule's alone.

    Args:
        module: as made under ``hp``.
        hp: the values at step 0.
        read: names that others read.
    """

    def __init__(
        self,
        module: LightningModule,
        optimizers: Sequence[torch.optim.Optimizer],
        hp: Mapping[str, Scalar],
        read: Sequence[str],
    ) -> None:
        self._module = module
        self._optimizers = optimizers
        self._read = read
        self.hp = dict(hp)
        self.steered: set[str] = set()

    def refuse_unread(self, names: Sequence[str], made_by: Any) -> None:
        """Raise :class:`UsageError` if nothing reads one of these hyper-parameters."""
        taken = inspect.signature(made_by).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
            return
        unread = [name for name in names if name not in taken and not self._is_read(name)]
        if unread:
            raise UsageError(
                f"nothing reads the hyper-parameter {unread[0]!r}: {type(self._module).__name__} takes "
                f"{', '.join(taken) or 'none'}, and no optimizer has a field of that name"
            )

    def apply(self, hp: Mapping[str, Scalar]) -> None:
        """Let the values of a step take effect.

        Raises:
            UsageError: a value has changed that nothing reads after ``__init__``.
            StateError: something else has changed what a schedule steers.
        """
        if hp == self.hp and not self.steered:
            return
        before, self.hp = self.hp, dict(hp)
        changed = [name for name, value in hp.items() if name not in before or before[name] != value]
        for name in changed:
            if not self._is_read(name):
                raise UsageError(
                    f"the hyper-parameter {name!r} changes from {before.get(name)!r} to {hp[name]!r}, but "
                    f"{type(self._module).__name__} reads it only when it is made: call save_hyperparameters() there "
                    f"and read self.hparams.{name}"
                )
            if name in self._module.hparams:
                self._module.hparams[name] = hp[name]
        for optimizer in self._optimizers:
            for index, group in enumerate(optimizer.param_groups):
                self._steer(index, group, group_values(group, before), group_values(group, hp))

    def _steer(self, index: int, group: dict[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for field, value in now.items():
            if field not in self.steered and field in before and before[field] == value:
                continue
            if not agree(group[field], before.get(field, value)):
                raise StateError(
                    f"{field} of param group {index} follows the hyper-parameter of that name, which was "
                    f"{before.get(field)!r}, but is {plain(group[field])!r}: a scheduler of configure_optimizers(), or "
                    f"the module, sets it as well. Let one of them decide: keep the hyper-parameter constant, or put "
                    f"the whole course into its schedule"
                )
            put(group, field, value)
            self.steered.add(field)

    def _is_read(self, name: str) -> bool:
        if name in self._read or name in self._module.hparams:
            return True
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return any(group_values(group, {name: 0}) for group in groups)
