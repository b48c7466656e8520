"""Logging in compiled code: it writes into a tensor, since it can change no Python object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hpstage.training.step_log import checked_name

_MOST = 256  # names of a process

_places: dict[str, int] = {}  # of names in the tensors
_traced: list[str] = []  # names that have been met since the list was emptied


def _place(name: str) -> int:
    """Return the index of a name. Called while code is compiled, not while it runs."""
    if checked_name(name) not in _places and len(_places) == _MOST:
        raise ValueError(f"more than {_MOST} names are logged")
    _traced.append(name)
    return _places.setdefault(name, len(_places))


def traced() -> tuple[str, ...]:
    """Return the names that the code compiled last logs, and reset them."""
    names = tuple(dict.fromkeys(_traced))
    _traced.clear()
    return names


class LoggedInTensors:
    """Collects, in compiled code, the sums and counts of logged values by name."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(_MOST, dtype=torch.float64, device=device)
        self._counts = torch.zeros(_MOST, dtype=torch.float64, device=device)
        torch._dynamo.assume_constant_result(_place)  # type: ignore[no-untyped-call]  # seconds to import
        for tensor in (self._sums, self._counts):
            torch._dynamo.mark_static_address(tensor)  # else there is no CUDA graph

    def log(self, name: str, value: Any) -> None:
        place = _place(name)
        self._sums[place].add_(value.detach().reshape(()) if isinstance(value, torch.Tensor) else float(value))
        self._counts[place].add_(1)

    def take(self, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        """Yield these names with the means of what was logged under them, and forget it."""
        if not names:
            return
        means = self._sums / self._counts
        values = means.tolist() if means.device.type == "cpu" else means
        self._sums.zero_()
        self._counts.zero_()
        yield from ((name, values[_places[name]]) for name in names)
