"""Measurement of the seconds of a step under each step backend, for ``numerics = "auto"``."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from hpstage.errors import NonFiniteLoss
from hpstage.plan.step_times import StepTimes, named
from hpstage.schedule import Scalar
from hpstage.torch.backends.lookup import backend_named

logger = logging.getLogger("hpstage")

_FIRST = 3
"""Number of steps that count as the beginning: the first may compile code, and the second may compile the optimizer."""
_STEPS = 50
_PART = 0.005
"""Maximum share of a search's steps that are measured: short searches measure fewer than :data:`_STEPS`."""
_BUILDS = 75
"""Number of eager steps that last as long as checking and measuring the programs of one sibling and of two."""
_SHARE = 0.02
"""Maximum seconds of a backend's beginning, as a share of what all steps take eagerly. A backend with a slower
beginning is not tried: its gain is not known before, so that trying it may be in vain."""
_LIKELY, _SHORT = 0.1, 0.005
"""The same share for siblings that are likely to gain, and the seconds below which a step is short. Most of a short
step is overhead, which stacked siblings share. If most weights come before the first trained one, siblings and epochs
share the results of these frozen layers."""
SHORT_OVER_FROZEN = 0.05
"""Seconds of a step up to which siblings with adapters in a frozen model are likely to gain: they share the overhead of
many small operations, but each computes its own products with frozen weights."""
_SECONDS, _LEAST = 5.0, 3
"""Measuring ends after this many seconds, but not before this many steps."""
_ROUNDS, _BLOCK, _LONG = 5, 0.05, 0.05
"""Siblings are compared with eager steps in _ROUNDS rounds of blocks of about _BLOCK seconds each, since the speed of a
machine varies: by a third from one second to the next in one case. There are fewer rounds if they would take more than
:data:`_SHARE` of a search, and none if a step takes :data:`_LONG` seconds."""


class Measured(Protocol):
    """A trainable that can be trained by several backends."""

    def train_by(self, numerics: str) -> bool: ...
    def setup(self, hp: Mapping[str, Scalar]) -> None: ...
    def train(self, step: int, hp: Mapping[str, Scalar]) -> None: ...
    def synchronize(self) -> None: ...
    def seconds(self) -> float:
        """Return the time at which all requested work is done, by the clock that measures this trainable."""


class Bundle(Protocol):
    def train_together(self, steps: Mapping[int, tuple[int, Mapping[str, Scalar]]]) -> Mapping[int, int]: ...


def _train_on(trainable: Measured, step: int, initial: Mapping[str, Scalar]) -> None:
    """Train a step. If training diverges under the values at step 0, the next step begins again from scratch."""
    try:
        trainable.train(step, initial)
    except NonFiniteLoss:
        trainable.setup(initial)


class _Together:
    """Siblings that are trained as one, all with the values at step 0: a step takes equally long with other values."""

    def __init__(self, bundle: Bundle, sides: Sequence[Measured]) -> None:
        self._bundle = bundle
        self._sides = sides

    def train_by(self, numerics: str) -> bool:
        stays = [side.train_by(numerics) for side in self._sides]
        return all(stays)

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        for side in self._sides:
            side.setup(hp)

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        self._bundle.train_together(dict.fromkeys(range(len(self._sides)), (step, hp)))
        for side in self._sides:
            side.train(step, hp)

    def synchronize(self) -> None:
        self._sides[0].synchronize()

    def seconds(self) -> float:
        return self._sides[0].seconds()


def measure(trainable: Measured, names: Iterable[str], initial: Mapping[str, Scalar], steps: float) -> dict[str, float]:
    """Measure the mean seconds of a step under each backend.

    Each backend trains about 50 steps under the values at step 0, or fewer if they are long. The result has the mean
    seconds by name, and the seconds of the first steps under ``"NAME begins"``. Later compilations count in the mean:
    they would happen again and again. A backend that fails is left out, except ``eager``, whose errors are the user's.
    If a backend's beginning takes long compared with ``steps`` eager steps, it is not tried, and ``"NAME untried"`` has
    the seconds of these steps.
    """
    found: dict[str, float] = {}
    for name in sorted(names, key="eager".__ne__):
        expected = steps * found.get("eager", math.inf)
        if _SHARE * expected < backend_named(name).begins:
            found[f"{name} untried"] = expected
        else:
            found |= _timed(trainable, name, initial, steps)
    return found


def _timed(trainable: Measured, name: str, initial: Mapping[str, Scalar], steps: float) -> dict[str, float]:
    """Return the mean seconds of a step under a backend, and the seconds of its beginning; empty if it fails."""
    most = min(_STEPS - _FIRST, _PART * steps)
    try:
        trainable.train_by(name)
        trainable.setup(initial)
        started = time.perf_counter()
        for step in range(_FIRST):
            _train_on(trainable, step, initial)
        trainable.synchronize()
        begun, began = trainable.seconds(), time.perf_counter()
        beginning, taken = began - started, 0
        while taken < _LEAST or (taken < most and time.perf_counter() - began < _SECONDS):
            _train_on(trainable, _FIRST + taken, initial)
            taken += 1
        seconds = trainable.seconds() - begun
    except Exception as error:
        if name == "eager":
            raise
        _not_considered(name, error)
        return {}
    each = seconds / taken
    return {name: each, f"{name} begins": max(0.0, beginning - _FIRST * each)}  # others may slow later steps


def _not_considered(name: str, error: Exception) -> None:
    logger.warning("numerics = %r is not considered: %s: %s", name, type(error).__name__, error)


def measure_pair(
    alone: Measured,
    bundle: Bundle,
    sides: Sequence[Measured],
    name: str,
    initial: Mapping[str, Scalar],
    steps: float,
    eager: float,
    *,
    likely: bool = False,
) -> dict[str, float]:
    """Return the seconds of a step for one sibling and for two stacked ones, under a backend that trains several; empty
    if it fails. It is not tried if measuring takes long compared with ``steps`` steps of ``eager`` seconds.

    Larger numbers of siblings are tried in training, by :class:`hpstage.execution.widening.Widening`.

    Args:
        alone: the trainable to train eagerly, in turn with the siblings.
        bundle: trains a step of the siblings together.
        sides: the siblings, members of the bundle.
        likely: whether stacking is likely to save time.
    """
    share = _LIKELY if likely or eager < _SHORT else _SHARE
    if share * steps * eager < backend_named(name).begins + _BUILDS * eager:
        return {f"{name} untried": steps * eager}
    times, begins = {}, 0.0
    for width in (1, 2):
        found = _timed(_Together(bundle, sides[:width]), name, initial, steps if eager >= _LONG else 0)
        if name not in found:
            return {}
        times[width] = found[name]
        begins += found[f"{name} begins"]
    if eager < _LONG:
        try:
            ratios = _in_turn(
                alone, {width: _Together(bundle, sides[:width]) for width in times}, initial, eager, steps
            )
        except Exception as error:  # for example of memory, with three models
            _not_considered(name, error)
            return {}
        times = {width: eager * ratio for width, ratio in ratios.items()}
    return {**named(StepTimes(tuple(times.items())), name), f"{name} begins": begins}


def _in_turn(
    alone: Measured, together: Mapping[int, Measured], initial: Mapping[str, Scalar], eager: float, steps: float
) -> dict[int, float]:
    """Return the seconds of a step of several siblings divided by those of an eager step, by number of siblings: the
    median of all rounds, in which the two are trained in turn."""
    alone.train_by("eager")
    alone.setup(initial)
    _block(alone, initial, _FIRST)
    count = max(_LEAST, round(min(_BLOCK / eager, _PART * steps)))
    ratios: dict[int, list[float]] = {width: [] for width in together}
    each = count * (len(together) + sum(together))  # eager steps that last as long as a round
    for _ in range(max(2, round(min(_ROUNDS, _SHARE * steps / each)))):
        for width, side in together.items():
            ratios[width].append(_block(side, initial, count) / _block(alone, initial, count))
    return {width: statistics.median(found) for width, found in ratios.items()}


def _block(trainable: Measured, initial: Mapping[str, Scalar], count: int) -> float:
    """Return the mean seconds of ``count`` steps, after one in which siblings join or leave."""
    for step in range(count + 1):
        if step == 1:
            trainable.synchronize()
            begun = trainable.seconds()
        _train_on(trainable, step, initial)
    trainable.synchronize()
    return (trainable.seconds() - begun) / count
