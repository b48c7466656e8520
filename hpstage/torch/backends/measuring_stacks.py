"""Measuring how long a step of several stacked siblings takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from hpstage.plan.step_times import StepTimes, widths
from hpstage.schedule import Scalar
from hpstage.torch.backends.measuring import Measured, clock_of, train_on

logger = logging.getLogger("hpstage")

_FIRST = 3
"""Steps that are not counted: programs are built in the first."""
_STEPS = 8
_PATIENCE = 2
"""Numbers of siblings in a row that do not pay, after which no larger one is tried."""
_SECONDS = 4.0
"""The most seconds of a round; it has one step at least."""


class Together(Protocol):
    def train_together(self, steps: Mapping[int, tuple[int, Mapping[str, Scalar]]]) -> Mapping[int, int]: ...


class StackMeasurement:
    """Trains 1, 2, 4, ... siblings as one, as long as that pays.

    A number is measured in several rounds, of which the fastest counts: what else the machine does makes a step slower,
    never faster.

    Args:
        together: trains a step of several.
        sides: those that it trains, set up.
        initial: the values at step 0, which all of them have: a step takes as long with others.
    """

    def __init__(self, together: Together, sides: Sequence[Measured], initial: Mapping[str, Scalar]) -> None:
        self._together = together
        self._sides = sides
        self._initial = initial
        self._device = sides[0].device
        self._clock = clock_of(sides[0])
        self._steps = [0] * len(sides)
        self._found: dict[int, float] = {}
        self._peaks: dict[int, int] = {}
        self.begins = 0.0
        """Seconds that the first steps took longer than others."""

    def times(self) -> StepTimes:
        """Return the seconds of a step by the number of siblings, until it no longer pays."""
        for width in widths(len(self._sides)):
            if not self._fits(width):
                break
            try:
                began = time.perf_counter()
                self._train(width, _FIRST)
                self._synchronize()
                begun = time.perf_counter()
                for known in [*list(self._found)[-1:], width] * 2:  # in turn, since they are compared
                    self._round(known)
                self.begins += max(0.0, begun - began - _FIRST * self._found[width])
            except Exception as error:
                if width == 1:
                    raise
                logger.warning(
                    "max_stacked = %d, but %d siblings cannot be trained as one here (%s: %s); at most %d are",
                    len(self._sides),
                    width,
                    type(error).__name__,
                    str(error).partition("\n")[0],
                    max(self._found),
                )
                self._found.pop(width, None)
                break
            self._peaks[width] = self._peak()
            if [*self._found].index(self._times.best) < len(self._found) - _PATIENCE:
                break
        return self._times

    @property
    def _times(self) -> StepTimes:
        return StepTimes(tuple(self._found.items()))

    def _round(self, width: int) -> None:
        self._train(width, 1)  # others leave or join
        self._synchronize()
        started, began, steps = time.perf_counter(), self._clock(), 0
        while steps < _STEPS and (not steps or time.perf_counter() - started < _SECONDS):
            self._train(width, 1)
            steps += 1
        self._synchronize()
        seconds = max((self._clock() - began) / steps, 1e-9)
        self._found[width] = min(seconds, self._found.get(width, seconds))

    def _train(self, width: int, steps: int) -> None:
        for _ in range(steps):
            self._together.train_together({side: (self._steps[side], self._initial) for side in range(width)})
            for side in range(width):
                train_on(self._sides[side], self._steps[side], self._initial)  # raises what its step has raised
                self._steps[side] += 1

    def _synchronize(self) -> None:
        self._sides[0].synchronize()

    # --- memory of a GPU ----------------------------------------------------------------------------------

    def _peak(self) -> int:
        """Return the most bytes that were allocated at a time so far."""
        return int(torch.cuda.max_memory_allocated(self._device)) if self._device.type == "cuda" else 0

    def _fits(self, width: int) -> bool:
        """Return whether so many siblings are expected to fit into the memory of the GPU: each further one takes as
        much as the last ones."""
        if self._device.type != "cuda" or not self._peaks:
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
                self._peaks[0] = int(torch.cuda.memory_allocated(self._device))
            return True
        before, last = sorted(self._peaks)[-2:]
        each = (self._peaks[last] - self._peaks[before]) / (last - before)
        needed = self._peaks[last] + each * (width - last)
        free, _ = torch.cuda.mem_get_info(self._device)
        room = free + torch.cuda.memory_reserved(self._device)
        if needed <= room:
            return True
        logger.warning(
            "max_stacked = %d, but the memory of %s (%.1f GB) holds no %d siblings, which would take some %.1f GB; at "
            "most %d are trained as one",
            len(self._sides),
            self._device,
            room / 1e9,
            width,
            needed / 1e9,
            last,
        )
        return False
