"""Measuring how long a step takes by each step backend, for ``numerics = "auto"``."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch

from hpstage.errors import NonFiniteLoss
from hpstage.schedule import Scalar
from hpstage.torch.backends.lookup import backend_named

logger = logging.getLogger("hpstage")

_FIRST = 3
"""Steps that count as the beginning: something may be compiled in the first, and for the optimizer in the second."""
STEPS = 50
SHARE = 0.1
"""A backend that begins slowly is tried if that is known to take at most this share of what the steps take eagerly:
what it gains is not known before, and trying it may be in vain."""
_SECONDS, _LEAST = 5.0, 3
"""Fewer steps are measured once they have taken so many seconds, but at least so many."""


class Measured(Protocol):
    """A trainable that can be trained by several backends."""

    device: torch.device

    @property
    def loads_elsewhere(self) -> bool: ...
    def train_by(self, numerics: str) -> bool: ...
    def setup(self, hp: Mapping[str, Scalar]) -> None: ...
    def train(self, step: int, hp: Mapping[str, Scalar]) -> None: ...
    def synchronize(self) -> None: ...


def clock_of(trainable: Measured) -> Callable[[], float]:
    """Return the clock to measure it by: where one thread does all the work, the time that it is running, since on a
    busy machine it waits for others."""
    alone = trainable.device.type == "cpu" and torch.get_num_threads() == 1 and not trainable.loads_elsewhere
    return time.thread_time if alone else time.perf_counter


def train_on(trainable: Measured, step: int, initial: Mapping[str, Scalar]) -> None:
    """Train a step; where training diverges under the values at step 0, from the beginning again after it."""
    try:
        trainable.train(step, initial)
    except NonFiniteLoss:
        trainable.setup(initial)


def measure(trainable: Measured, names: Iterable[str], initial: Mapping[str, Scalar], steps: float) -> dict[str, float]:
    """Train some 50 steps by each backend, or fewer if they are long, under the values at step 0.

    Return the mean seconds of a step, by name, and those until the backend had begun, under ``"NAME begins"``. What is
    compiled later than at the beginning is part of the mean: it would be compiled again and again. A backend that fails
    is left out, unless it is ``eager``, whose errors are the user's. One that takes long to begin, compared with
    ``steps`` eager steps, is not tried.
    """
    found: dict[str, float] = {}
    clock = clock_of(trainable)
    for name in sorted(names, key="eager".__ne__):
        expected = steps * found.get("eager", math.inf)
        if SHARE * expected < backend_named(name).begins:
            found[f"{name} untried"] = expected
            continue
        try:
            trainable.train_by(name)
            trainable.setup(initial)
            started = time.perf_counter()
            for step in range(_FIRST):
                train_on(trainable, step, initial)
            trainable.synchronize()
            beginning, begun = time.perf_counter() - started, clock()
            taken = 0
            while taken < STEPS - _FIRST and (taken < _LEAST or clock() - begun < _SECONDS):
                train_on(trainable, _FIRST + taken, initial)
                taken += 1
            trainable.synchronize()
        except Exception as error:
            if name == "eager":
                raise
            logger.warning("numerics = %r is not considered: %s: %s", name, type(error).__name__, error)
            continue
        found[name] = (clock() - begun) / taken
        found[f"{name} begins"] = max(0.0, beginning - _FIRST * found[name])  # other processes may compile
    return found
