"""The order of samples as a function of (seed, position); its only cursor is the number of samples consumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from hpstage.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

Indices: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


class SampleOrder:
    """Passes over ``population`` samples, each in a different order: ``Philox(key=[seed, epoch])``.

    Caches the order of the last requested epoch; a permutation of 1.2 million samples takes 11 ms to compute.
    Subclasses override :meth:`draw`.
    """

    def __init__(self, population: int) -> None:
        if population < 1:
            raise UsageError("the data set is empty")
        self.population = population
        self._made_for: tuple[int, int] | None = None
        self._drawn: Indices | None = None

    def draw(self, seed: int, epoch: int) -> Indices:
        """Return the indices of an epoch's samples in their order: int64, shape ``(population,)``."""
        return philox(seed, epoch).permutation(self.population)

    def take(self, seed: int, position: int, count: int) -> Indices:
        """Return indices of ``count`` samples from ``position`` (samples consumed so far): int64, shape ``(count,)``.

        A batch at the end of an epoch is completed from the next epoch, so that every batch is full. The result may be
        a view: do not write to it.
        """
        epoch, offset = divmod(position, self.population)
        if offset + count <= self.population:
            return self._epoch(seed, epoch)[offset : offset + count]
        import numpy as np

        pieces = []
        while count > 0:
            piece = self._epoch(seed, epoch)[offset : offset + count]
            pieces.append(piece)
            count -= len(piece)
            epoch, offset = epoch + 1, 0
        return np.concatenate(pieces)

    def _epoch(self, seed: int, epoch: int) -> Indices:
        if self._drawn is None or self._made_for != (seed, epoch):
            self._drawn = self.draw(seed, epoch)
            self._made_for = (seed, epoch)
        return self._drawn


def philox(seed: int, epoch: int) -> np.random.Generator:
    """Return a generator for one epoch of a seed."""
    import numpy as np

    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
