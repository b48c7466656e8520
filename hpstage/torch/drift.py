"""Watches for training that goes on beside the state: numbers and tensors in attributes that no state holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hpstage.errors import StateError

_SCALARS = (bool, int, float, str, type(None))


class DriftWatch:
    """Remembers the plain attributes of a model's modules, and of the user's object, as they were built.

    Parameters and buffers are in the state; modes are functions of the code. An attribute that is new is taken
    for a cache; one that was there and has changed is state that would be lost.

    Args:
        model: all of its modules are watched.
        others: further objects by name.
    """

    def __init__(self, model: torch.nn.Module, others: dict[str, object]) -> None:
        self._model = model
        self._others = others
        self._before = {path: _mark(value) for path, _, _, value in self._attributes()}

    def check(self) -> None:
        """Raises :class:`StateError` naming an attribute that has changed."""
        for path, owner, name, value in self._attributes():
            before = self._before.get(path)
            if before is not None and not _same(before, _mark(value)):
                remedy = f"register_buffer({name!r}, ...)" if isinstance(owner, torch.nn.Module) else "extra_state()"
                raise StateError(
                    f"{path} has changed in training, but is in no state: a fork would not have it. Keep it in "
                    f"{remedy}, or compute it from the step's hyper-parameters"
                )

    def _attributes(self) -> Iterator[tuple[str, object, str, Any]]:
        for path, module in self._model.named_modules(prefix="model"):
            yield from _watched(path, module)
        for path, other in self._others.items():
            yield from _watched(path, other)


def _watched(path: str, owner: object) -> Iterator[tuple[str, object, str, Any]]:
    for name, value in getattr(owner, "__dict__", {}).items():
        if (
            name not in ("training", "hp")
            and not name.startswith("__")
            and isinstance(value, (*_SCALARS, torch.Tensor))
        ):
            yield f"{path}.{name}", owner, name, value


def _mark(value: Any) -> tuple[Any, Any]:
    """What tells a changed value: a tensor's identity and version (it is kept alive, so that its id stays its own)."""
    if isinstance(value, torch.Tensor):
        return value, 0 if value.is_inference() else value._version  # inference tensors count no versions
    return value, type(value)


def _same(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    if isinstance(before[0], torch.Tensor) or isinstance(now[0], torch.Tensor):
        return before[0] is now[0] and before[1] == now[1]
    return bool(before == now) or (before[0] != before[0] and now[0] != now[0])
