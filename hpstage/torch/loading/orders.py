"""The orders of torch's samplers, as functions of (seed, epoch), and how a sequence of samples is cut into batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from hpstage.errors import UsageError
from hpstage.training.randomness import Purpose, mix
from hpstage.training.sample_order import Indices, SampleOrder, philox


class Sequential(SampleOrder):
    """Every epoch in the order of the data set."""

    def draw(self, seed: int, epoch: int) -> Indices:
        return np.arange(self.population)


class Subset(SampleOrder):
    """In every epoch a permutation of given indices, as in ``SubsetRandomSampler``."""

    def __init__(self, indices: Sequence[int]) -> None:
        super().__init__(len(indices))
        self._indices = np.asarray(indices, dtype=np.int64)

    def draw(self, seed: int, epoch: int) -> Indices:
        return self._indices[super().draw(seed, epoch)]


class Drawn(SampleOrder):
    """In every epoch ``count`` draws from ``population`` samples, with replacement or from one permutation after
    another, as in ``RandomSampler`` with ``num_samples``."""

    def __init__(self, population: int, count: int, *, replacement: bool) -> None:
        super().__init__(count)
        self._among, self._replacement = population, replacement

    def draw(self, seed: int, epoch: int) -> Indices:
        generator = philox(seed, epoch)
        if self._replacement:
            return generator.integers(self._among, size=self.population)
        passes = -(-self.population // self._among)
        return np.concatenate([generator.permutation(self._among) for _ in range(passes)])[: self.population]


class Weighted(SampleOrder):
    """In every epoch ``count`` samples drawn by their weights, as in ``WeightedRandomSampler``."""

    def __init__(self, weights: torch.Tensor, count: int, *, replacement: bool) -> None:
        super().__init__(count)
        self._weights, self._replacement = weights, replacement
        self._drawn_by: torch.Tensor | None = None  # the weights when the last epoch was drawn
        self._end = 0  # number of samples consumed

    def take(self, seed: int, position: int, count: int) -> Indices:
        self._end = position + count
        return super().take(seed, position, count)

    def is_outdated(self, *, ahead: bool) -> bool:
        """Return whether weights have changed since the present epoch was drawn, if it is unfinished.

        ``ahead``: whether later epochs, too, may have been drawn already.
        """
        begun = ahead or self._end % self.population != 0
        return begun and self._drawn_by is not None and not torch.equal(self._drawn_by, self._weights)

    def draw(self, seed: int, epoch: int) -> Indices:
        self._drawn_by = self._weights.clone()
        generator = torch.Generator().manual_seed(mix(seed, epoch, Purpose.DATA))
        drawn: Indices = torch.multinomial(
            self._weights, self.population, self._replacement, generator=generator
        ).numpy()
        return drawn


def order_of(sampler: Any) -> tuple[SampleOrder, dict[str, Any]]:
    """Return the order that replaces a sampler, and by name the settings that decide it besides (seed, epoch).

    Raises:
        UsageError: the sampler's order cannot be made a function of (seed, epoch).
    """
    kind = type(sampler)
    # By names, since torchdata's StatefulDataLoader has its own RandomSampler. A user's subclass may do anything.
    known = kind.__module__ == "torch.utils.data.sampler" or kind.__module__.startswith("torchdata.")
    match kind.__name__ if known else "":
        case "SequentialSampler":
            return Sequential(len(sampler.data_source)), {"order": "sequential"}
        case "RandomSampler":
            population, count, replacement = len(sampler.data_source), sampler.num_samples, sampler.replacement
            if not replacement and count == population:
                return SampleOrder(population), {"order": "random"}
            options = {"order": "random", "num_samples": count, "replacement": replacement}
            return Drawn(population, count, replacement=replacement), options
        case "WeightedRandomSampler":
            weights, count, replacement = sampler.weights, sampler.num_samples, sampler.replacement
            options = {"order": "weighted", "weights": weights, "num_samples": count, "replacement": replacement}
            return Weighted(weights, count, replacement=replacement), options
        case "SubsetRandomSampler":
            indices = list(sampler.indices)
            return Subset(indices), {"order": "subset", "indices": indices}
    distributed = any(base.__name__ == "DistributedSampler" for base in kind.__mro__)
    raise UsageError(
        f"the DataLoader's sampler is a {kind.__name__}, whose order hpstage cannot make a function of seed and epoch, "
        f"as it must be for training to be forked at any step. Use shuffle=True or False, WeightedRandomSampler or "
        f"SubsetRandomSampler, or put the order into the data set"
        + ("; each trial is trained by one process, so its samples need not be distributed" if distributed else "")
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """Cuts passes over ``population`` samples into batches.

    Attributes:
        population: number of samples of an epoch.
        end: the last batch of an epoch, if fewer samples are left than a batch has: it is completed from the next epoch
            (``"full"``), it is short (``"short"``, a DataLoader's ``drop_last=False``), or the samples are skipped
            (``"dropped"``, ``drop_last=True``).
    """

    population: int
    end: Literal["full", "short", "dropped"]

    def batch(self, position: int, size: int) -> tuple[int, int]:
        """Return the position where the next batch after ``position`` begins, and its number of samples.

        ``size`` is the batch size of this step: it alone decides whether the samples left in the epoch are dropped.

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
                f"drop_last=True, so every batch is dropped: lower the batch size, or set drop_last=False"
            )
        return position + left, size

    def count(self, size: int, samples: int | None = None) -> int:
        """Return the number of batches in ``samples`` samples; by default in those of an epoch."""
        samples = self.population if samples is None else samples
        return samples // size if self.end == "dropped" else -(-samples // size)

    def end_of_epoch(self, position: int) -> int:
        """Return the position where the epoch that contains ``position`` ends."""
        return (position // self.population + 1) * self.population
