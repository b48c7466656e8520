"""The time that a worker takes for a step of several chains, trained side by side. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

_FALLS = 0.95
"""A wider bundle pays if it reduces a chain's share of the seconds to this fraction or less. A smaller gain is within
the measurement error."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured seconds of a step in which a worker trains several chains side by side, by the number of chains.

    Args:
        seconds: pairs of number and seconds, by ascending number; the first is for one chain.

    Raises:
        ValueError: the numbers do not ascend from 1, or the seconds are not positive.
    """

    seconds: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        widths = [width for width, _ in self.seconds]
        if (
            widths[:1] != [1]
            or any(a >= b for a, b in pairwise(widths))
            or any(taken <= 0 for _, taken in self.seconds)
        ):
            raise ValueError(
                f"seconds is {self.seconds}; numbers of chains must ascend from 1 on, and seconds be positive"
            )

    def of(self, width: int) -> float:
        """Return the seconds of a step of ``width`` chains: interpolated linearly between measured numbers; beyond the
        largest, proportional to the number of chains."""
        for (a, at_a), (b, at_b) in pairwise(self.seconds):
            if width <= b:
                return at_a + (at_b - at_a) * (width - a) / (b - a)
        last, taken = self.seconds[-1]
        return taken * max(1.0, width / last)

    def slowness(self, width: int) -> float:
        """Return the factor by which a chain takes longer among ``width`` concurrent chains than by itself."""
        return self.of(width) / self.of(1)

    def share(self, width: int) -> float:
        """Return a chain's share of the worker's seconds, relative to those it takes alone."""
        return self.slowness(width) / width

    @property
    def best(self) -> int:
        """The largest number of chains that pays, compared with the best of the smaller ones."""
        best = 1
        for width, _ in self.seconds:
            if self.share(width) <= _FALLS * self.share(best):
                best = width
        return best

    @property
    def widest(self) -> int:
        """The largest measured number of chains."""
        return self.seconds[-1][0]

    def allowed(self, slots: int) -> int:
        """Return the maximum number of chains to train side by side: the best one. If that is the largest measured
        number, up to twice as many are allowed, so that larger numbers are measured too."""
        return min(slots, 2 * self.widest if self.best == self.widest else self.best)

    def extended(self, other: StepTimes) -> StepTimes:
        """Return these times and another measurement's times for larger numbers. Those are scaled to agree with these
        at the largest number of these, since the steps of the other measurement may take longer."""
        scale = self.of(self.widest) / other.of(self.widest)
        return StepTimes((*self.seconds, *((w, scale * taken) for w, taken in other.seconds if w > self.widest)))

    def foreseen(self, width: int) -> StepTimes:
        """Return these times up to ``width`` chains. If two is the largest measured number, the time of ``width``
        chains is extrapolated linearly, since more chains share the same work as two do."""
        if self.widest != 2 or width <= 2:
            return self.up_to(width)
        alone, two = self.of(1), self.of(2)
        return StepTimes((*self.seconds, (width, alone + (width - 1) * max(0.0, two - alone))))

    def up_to(self, width: int) -> StepTimes:
        """Return these times for workers that train at most ``width`` chains side by side."""
        known = dict(self.seconds)
        return StepTimes(tuple((w, known.get(w, self.of(w))) for w in sorted({*known, width}) if w <= width))


ALONE = StepTimes(((1, 1.0),))
"""The times before several were measured: side by side, they are assumed to take as long as one after the other."""

_NAMED = "at a time"


def named(times: StepTimes, backend: str = "") -> dict[str, float]:
    """Return the times as :meth:`hpstage.executor.Executor.measure` names them: ``{"1 at a time": 0.004, ...}``, or for
    a step backend ``{"stacked, 1 at a time": 0.004, ...}``."""
    by = f"{backend}, " if backend else ""
    return {f"{by}{width} {_NAMED}": seconds for width, seconds in times.seconds}


def among(found: Mapping[str, float]) -> dict[str, StepTimes]:
    """Return the step times among measurements, by step backend; by ``""`` if there is no choice of backends."""
    pairs: dict[str, list[tuple[int, float]]] = {}
    for name, taken in found.items():
        if name.endswith(_NAMED):
            backend, _, width = name.removesuffix(_NAMED).rpartition(", ")
            pairs.setdefault(backend, []).append((int(width), taken))
    return {backend: StepTimes(tuple(sorted(measured))) for backend, measured in pairs.items()}


UNTRIED = " untried"


def pooled(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means of several workers' measurements, without those at which any worker failed. A worker that has
    not tried a backend, since few steps were expected, does not count as failed."""
    names = dict.fromkeys(name for its in found for name in its)
    tried = [name for name in names if not name.endswith(UNTRIED)]
    means = {
        name: fmean(its[name] for its in found if name in its)
        for name in tried
        if all(name in its or _backend_of(name) + UNTRIED in its for its in found)
    }
    untried = [name for name in names if name.endswith(UNTRIED) and all(name in its for its in found)]
    return means | {name: fmean(its[name] for its in found) for name in untried}


def _backend_of(name: str) -> str:
    return name.split(", ")[0].removesuffix(" begins")
