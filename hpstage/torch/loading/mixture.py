"""Mixtures of data sets: the weight of each is a hyperparameter, whose schedule decides how often it is sampled."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from math import inf, isfinite
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset

from hpstage.errors import UsageError
from hpstage.schedule import Scalar
from hpstage.schedule.space import MIXTURE
from hpstage.training.randomness import Purpose, mix, seed_of
from hpstage.training.sample_order import Indices, SampleOrder

_BLOCK = 4096  # positions whose sources are drawn at a time


class Mixture(ConcatDataset[Any]):
    """Several map-style data sets as one, sampled by weights that are hyperparameters.

    ::

        def dataset(self):
            return hpstage.torch.Mixture({"prose": Windows(prose), "code": Windows(code)})

        hp = {"lr": 0.1, "mixture.prose": s.linear(0.9, end_factor=0.5, total_iters=1000), "mixture.code": 0.1, ...}

    Each source has its own order of samples, the same as without a mixture under the same seed. At each position, a
    uniform random number and the weights of that step decide from which source the sample comes; then the source's
    order at that position decides which sample. Both are functions of (seed, position): no position in a source is part
    of a state, a schedule of weights is exact at any step, and mixtures with the same seed have most samples in common.
    Only the ratios of the weights count.

    An epoch has as many positions as there are samples. Return the mixture from ``dataset()``, or pass it to
    ``run.batches``, or to a Trainer as ``train_dataset``. Lightning needs a DataLoader of it, with ``shuffle=True``;
    the mixture decides the order there, too.
    """

    def __init__(self, sources: Mapping[str, Dataset[Any]]) -> None:
        if not sources:
            raise UsageError("the mixture has no source; give at least one data set by name")
        for name, source in sources.items():
            if not (hasattr(source, "__len__") and len(source)):
                raise UsageError(f"source {name!r} of the mixture is empty, or a stream; give a map-style data set")
        self.names = tuple(sources)
        super().__init__(sources.values())

    def order(self) -> SampleOrder:
        """Return the order of the samples."""
        return _MixedOrder([len(source) for source in self.datasets])  # type: ignore[arg-type]

    def seed(self, hp: Mapping[str, Scalar]) -> MixedSeed:
        """Return the seed with the weights, which together decide the order.

        Raises:
            UsageError: a weight is missing, names no source, or is not a number of at least 0; or the sum of the
                weights is 0 or infinite.
        """
        if other := [name for name in hp if name.startswith(MIXTURE) and name[len(MIXTURE) :] not in self.names]:
            raise UsageError(f"{other[0]!r} is the weight of no source; the mixture has {', '.join(self.names)}")
        weights: list[float] = []
        for name in self.names:
            weight = hp.get(MIXTURE + name)
            if weight is None:
                raise UsageError(
                    f"source {name!r} of the mixture has no weight; give a hyperparameter {MIXTURE + name!r} (0 leaves "
                    f"the source out)"
                )
            if type(weight) not in (int, float) or not isfinite(weight) or weight < 0:  # type: ignore[arg-type,operator]
                raise UsageError(f"{MIXTURE + name!r} is {weight!r}; a weight is a number of at least 0")
            weights.append(float(weight))
        *upto, whole = accumulate(weights)
        if not 0 < whole < inf:
            raise UsageError(f"the weights of the mixture add up to {whole}; give a finite sum above 0")
        return MixedSeed(seed_of(hp), (*(part / whole for part in upto), 1.0))


def mixture_of(data: Any, *, who: str = "the data set") -> Mixture | None:
    """Return a data set if it is a mixture, otherwise ``None``. Raise :class:`UsageError` if another data set contains
    a mixture, whose weights would have no effect."""
    if isinstance(data, Mixture):
        return data
    parts = getattr(data, "datasets", None)
    inner = list(parts.values() if isinstance(parts, dict) else parts) if isinstance(parts, dict | list | tuple) else []
    if any(mixture_of(part) is not None for part in [*inner, getattr(data, "dataset", None)] if part is not data):
        raise UsageError(
            f"{who} is a {type(data).__name__} of a Mixture, whose weights would have no effect. Make a Mixture of "
            f"{type(data).__name__} data sets instead"
        )
    return None


class MixedSeed(int):
    """A seed with the cumulative shares of a mixture's sources. Two are equal if both seed and shares are."""

    upto: tuple[float, ...]

    def __new__(cls, seed: int, upto: tuple[float, ...]) -> MixedSeed:
        made = super().__new__(cls, seed)
        made.upto = upto
        return made

    def __reduce__(self) -> Any:
        return MixedSeed, (int(self), self.upto)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MixedSeed) and (int(self), self.upto) == (int(other), other.upto)

    def __ne__(self, other: object) -> bool:  # else int's
        return not self == other

    def __hash__(self) -> int:
        return hash((int(self), self.upto))


def seed_in(data: object, hp: Mapping[str, Scalar]) -> int:
    """Return the seed of a trial's random numbers and sample order. For a mixture, it also holds the weights."""
    return data.seed(hp) if isinstance(data, Mixture) else seed_of(hp)


class _MixedOrder(SampleOrder):
    """The order of a mixture: indices into the concatenated sources."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(sum(lengths))
        self._orders = [SampleOrder(length) for length in lengths]
        self._starts = np.cumsum([0, *lengths])
        self._numbers: tuple[int, int, Any] | None = None  # of the last block

    def take(self, seed: int, position: int, count: int) -> Indices:
        if not isinstance(seed, MixedSeed):
            raise UsageError(
                "a Mixture is for dataset() of a TorchTrainable, run.batches(), the training DataLoader of a "
                "LightningTrainable, and train_dataset of a TrainerTrainable"
            )
        sources = np.searchsorted(seed.upto, self._uniform(int(seed), position, count), side="right")
        found = np.empty(count, dtype=np.int64)
        for number, order in enumerate(self._orders):
            chosen = sources == number
            if chosen.any():
                found[chosen] = order.take(int(seed), position, count)[chosen] + self._starts[number]
        return found

    def _uniform(self, seed: int, position: int, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return a number in [0, 1) for each of ``count`` positions."""
        first, last = position // _BLOCK, (position + count - 1) // _BLOCK
        blocks = [self._block(seed, block) for block in range(first, last + 1)]
        start = position - first * _BLOCK
        return np.concatenate(blocks)[start : start + count]

    def _block(self, seed: int, block: int) -> Any:
        if self._numbers is None or self._numbers[:2] != (seed, block):
            generator = np.random.Generator(np.random.Philox(key=mix(seed, block, Purpose.DATA)))
            self._numbers = seed, block, generator.random(_BLOCK)
        return self._numbers[2]
