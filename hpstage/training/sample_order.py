"""The order of samples as a function of (seed, position); its only cursor is the number of samples consumed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpstage.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    Indices = np.ndarray[tuple[int], np.dtype[np.int64]]


class SampleOrder:
    """Passes over ``population`` samples, each in a different order: ``Philox(key=[seed, epoch])``.

    Caches the permutation of the last requested epoch, which takes 11 ms to compute for 1.2 million samples.
    """

    def __init__(self, population: int) -> None:
        if population < 1:
            raise UsageError("the data set is empty")
        self.population = population
        self._made_for: tuple[int, int] | None = None
        self._permutation: Indices | None = None

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

    def rest(self, position: int) -> int:
        """Return the number of samples left in the epoch that contains ``position``, at least 1."""
        return self.population - position % self.population

    def _epoch(self, seed: int, epoch: int) -> Indices:
        if self._permutation is None or self._made_for != (seed, epoch):
            import numpy as np

            key = np.array([seed & 0xFFFFFFFFFFFFFFFF, epoch], dtype=np.uint64)
            self._permutation = np.random.Generator(np.random.Philox(key=key)).permutation(self.population)
            self._made_for = (seed, epoch)
        return self._permutation
