"""How a course of samples is cut into batches, as a function of the position and the batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpstage.errors import UsageError


@dataclass(frozen=True, slots=True)
class Cut:
    """Cuts passes over ``population`` samples into batches.

    Attributes:
        population: number of samples of an epoch.
        end: what happens at the end of an epoch: a batch is completed from the next epoch (``"full"``), holds what is
            left (``"short"``, a DataLoader's ``drop_last=False``), or what is left is skipped if it is less than a
            batch (``"dropped"``, ``drop_last=True``).
    """

    population: int
    end: Literal["full", "short", "dropped"]

    def batch(self, position: int, size: int) -> tuple[int, int]:
        """Return the position where the next batch after ``position`` begins, and its number of samples.

        What is left of an epoch is dropped by the step that would take it: under its batch size, whatever the last one
        was.

        Raises:
            UsageError: no epoch has a batch of this size.
        """
        if self.end == "full":
            return position, size
        left = self.population - position % self.population
        if left >= size:
            return position, size
        if self.end == "short":
            return position, left
        if size > self.population:
            raise UsageError(
                f"the batch size is {size}, an epoch has {self.population} samples, and the DataLoader has "
                f"drop_last=True, so that every batch is dropped: lower the batch size, or set drop_last=False"
            )
        return position + left, size

    def count(self, size: int, samples: int | None = None) -> int:
        """Return the number of batches that so many samples give; by default those of an epoch."""
        samples = self.population if samples is None else samples
        return samples // size if self.end == "dropped" else -(-samples // size)

    def end_of_epoch(self, position: int) -> int:
        """Return the position where the epoch that contains ``position`` ends."""
        return (position // self.population + 1) * self.population
