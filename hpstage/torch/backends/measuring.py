"""Measuring how long a step takes by each step backend, for ``numerics = "auto"``."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Protocol

from hpstage.schedule import Scalar

logger = logging.getLogger("hpstage")

_FIRST = 3
"""Steps that count as the beginning: something may be compiled in the first, and for the optimizer in the second."""
STEPS = 50


class Measured(Protocol):
    """A trainable that can be trained by several backends."""

    def train_by(self, numerics: str) -> bool: ...
    def setup(self, hp: Mapping[str, Scalar]) -> None: ...
    def train(self, step: int, hp: Mapping[str, Scalar]) -> None: ...
    def synchronize(self) -> None: ...


def measure(trainable: Measured, names: Iterable[str], initial: Mapping[str, Scalar]) -> dict[str, float]:
    """Train some 50 steps by each backend, under the values at step 0.

    Return the mean seconds of a step, by name, and those until the backend had begun, under ``"NAME begins"``. What is
    compiled later than at the beginning is part of the mean: it would be compiled again and again. A backend that fails
    is left out, unless it is ``eager``, whose errors are the user's.
    """
    found = {}
    for name in names:
        try:
            trainable.train_by(name)
            trainable.setup(initial)
            began = time.perf_counter()
            for step in range(_FIRST):
                trainable.train(step, initial)
            trainable.synchronize()
            begun = time.perf_counter()
            for step in range(_FIRST, STEPS):
                trainable.train(step, initial)
            trainable.synchronize()
        except Exception as error:
            if name == "eager":
                raise
            logger.warning("numerics = %r is not considered: %s: %s", name, type(error).__name__, error)
            continue
        found[name] = (time.perf_counter() - begun) / (STEPS - _FIRST)
        found[f"{name} begins"] = max(0.0, begun - began - _FIRST * found[name])
    return found
