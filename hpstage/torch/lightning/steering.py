"""Sets changing hyperparameters in the optimizers of ``configure_optimizers`` and in ``self.hparams``."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule

from hpstage.errors import StateError, UsageError
from hpstage.errors.text import changed_after
from hpstage.schedule import Scalar
from hpstage.torch import follow
from hpstage.torch.follow import agree, plain, put
from hpstage.training.code.graph import functions_reached
from hpstage.training.code.names import names_in, texts_in

_ALIASES = {"learning_rate": "lr"}
"""Hyperparameters that LightningModules often name differently, and the optimizer fields that they mean."""
_ONCE = ("__init__", "configure_optimizers")
"""Methods that run only before training."""


class Steering:
    """Sets hyperparameters that change in the param groups and ``hparams`` of a module.

    A hyperparameter that never changes is not set: the module was made with it, and its own schedulers continue from
    there. Once a schedule has changed a field, only that schedule may change it.

    Args:
        module: the module, made under ``hp``.
        optimizers: the optimizers of the module.
        hp: the values at step 0.
        read: hyperparameters that hpstage itself reads.

    Attributes:
        hp: the values set last.
        steered: the fields of param groups that a schedule has changed.
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

    def refuse_unread(self, made_by: Any) -> None:
        """Refuse hyperparameters without effect.

        Args:
            made_by: the class or function that made the module; it reads the hyperparameters that are its parameters.

        Raises:
            UsageError: nothing reads a hyperparameter, or an optimizer was built with another value.
        """
        taken = inspect.signature(made_by).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
            return
        name = type(self._module).__name__
        for unread in (one for one in self.hp if one not in taken and one not in self._read):
            takes = f"{name} takes {', '.join(taken) or 'none'}"
            if not self._fields(unread):
                raise UsageError(
                    f"nothing reads the hyperparameter {unread!r}: {takes}, and no optimizer has a field of that name"
                )
            for group, values in self._groups({unread: self.hp[unread]}):
                for field, value in values.items():
                    if not agree(group[field], value):
                        raise UsageError(
                            f"the hyperparameter {unread!r} is {value!r}, but configure_optimizers() has built a "
                            f"param group with {field}={plain(group[field])!r}. {takes}; let it take {unread!r}, too"
                        )

    def refuse_scheduled_twice(self, names: Collection[str], scheduler: Any) -> None:
        """Refuse a schedule of the learning rate if a scheduler of ``configure_optimizers`` sets the rate, too.

        Args:
            names: the hyperparameters that change.
            scheduler: the scheduler.

        Raises:
            UsageError: one of the hyperparameters is the learning rate.
        """
        for name in names:
            if any("lr" in _values(group, {name: 0}) for group in scheduler.optimizer.param_groups):
                raise UsageError(
                    f"the learning rate is set both by the schedule of the hyperparameter {name!r} and by a "
                    f"{type(scheduler).__name__} of configure_optimizers(). Keep the hyperparameter constant, or put "
                    f"all changes into its schedule"
                )

    def apply(self, hp: Mapping[str, Scalar]) -> None:
        """Apply the values of a step.

        Raises:
            UsageError: a hyperparameter has changed that nothing reads after ``__init__``.
            StateError: something else has changed a field that follows a schedule.
        """
        if hp == self.hp and not self.steered:
            return
        before, self.hp = self.hp, dict(hp)
        changed = [name for name, value in hp.items() if name not in before or before[name] != value]
        for name in changed:
            if not (name in self._read or self._fields(name) or self._is_read_later(name)):
                made = type(self._module).__name__
                remedy = f"call save_hyperparameters() in {made}, and read self.hparams.{name} in its steps"
                raise UsageError(changed_after(name, before.get(name), hp[name], remedy))
            if name in self._module.hparams:
                self._module.hparams[name] = hp[name]
        for optimizer in self._optimizers:
            for index, group in enumerate(optimizer.param_groups):
                self._steer(index, group, _values(group, before), _values(group, hp))

    def _steer(self, index: int, group: dict[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for field, value in now.items():
            if field not in self.steered and field in before and before[field] == value:
                continue
            if not agree(group[field], before.get(field, value)):
                raise StateError(
                    f"{field} of param group {index} is {plain(group[field])!r}, but the hyperparameter that it "
                    f"follows was {before.get(field)!r}: a scheduler of configure_optimizers(), or the module, sets "
                    f"{field}, too. Keep the hyperparameter constant, or put all changes into its schedule"
                )
            put(group, field, value)
            self.steered.add(field)

    def _groups(self, hp: Mapping[str, Scalar]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield each param group with the values of its fields under ``hp``."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield group, _values(group, hp)

    def _fields(self, name: str) -> bool:
        """Return whether a hyperparameter names a field of a param group."""
        return any(values for _, values in self._groups({name: 0}))

    def _is_read_later(self, name: str) -> bool:
        """Return whether the module reads ``self.hparams.NAME`` after it was made."""
        if name not in self._module.hparams:
            return False
        codes = [function.__code__ for function in functions_reached(type(self._module))]
        return any(name in {*names_in(code), *texts_in(code)} for code in codes if code.co_name not in _ONCE)


def _values(group: dict[str, Any], hp: Mapping[str, Scalar]) -> dict[str, Any]:
    renamed = {_ALIASES[name]: value for name, value in hp.items() if name in _ALIASES}
    return follow.group_values(group, {**renamed, **hp})
