"""Micro-anneals: short decays of one trial over candidate mixtures of data, and their differences to a control.

OLMo 2 (arXiv 2501.00656, section 4) and Llama 3 (arXiv 2407.21783, section 3.1) use them to judge data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan, sqrt
from statistics import NormalDist, fmean, stdev
from typing import Any, Generic, Protocol, SupportsIndex, TypeVar

from hpstage.errors import UsageError
from hpstage.errors.arguments import whole
from hpstage.errors.text import clean, table
from hpstage.plan.nodes import PlannedTrial
from hpstage.schedule import linear
from hpstage.schedule.space import MIXTURE
from hpstage.search.results.branching import check_names

_T = (12.706, 4.303, 3.182, 2.776)
"""The 97.5 % quantile of Student's t with 1 to 4 degrees of freedom, where the expansion is too coarse."""


@dataclass(frozen=True, slots=True)
class MixtureDifference:
    """A metric of one mixture, and its difference from the control's; both are means over seeds.

    ``low`` and ``high`` are the 95 % confidence interval of the difference, paired by seed (Student's t); NaN with
    fewer than two seeds.
    """

    mixture: str
    metric: str
    value: float
    difference: float
    low: float
    high: float
    seeds: int


class _Trial(Protocol):
    @property
    def planned(self) -> PlannedTrial: ...

    @property
    def metrics(self) -> dict[int, dict[str, float]]: ...


Trial = TypeVar("Trial", bound=_Trial)


@dataclass(frozen=True, slots=True, repr=False)
class MicroAnneals(Generic[Trial]):
    """Decays by mixture: one trial per seed, in the same order. Printed as a table of differences from the control."""

    trials: Mapping[str, Sequence[Trial]]
    control: str

    def differences(self, metric: str | None = None) -> list[MixtureDifference]:
        """Return the differences from the control at the end of the decays, of ``metric`` or of all metrics."""
        last = {name: [one.metrics.get(one.planned.steps, {}) for one in them] for name, them in self.trials.items()}
        names = dict.fromkeys(name for them in last.values() for found in them for name in found)
        return [
            _difference(mixture, name, last[mixture], last[self.control])
            for mixture in last
            for name in names
            if metric in (None, name)
        ]

    def __repr__(self) -> str:
        titles = ("mixture", "metric", "mean", "difference to control", "95 % interval", "seeds")
        rows = [
            (clean(one.mixture), clean(one.metric), f"{one.value:.6g}", "control", "", str(one.seeds))
            if one.mixture == self.control
            else (clean(one.mixture), clean(one.metric), f"{one.value:.6g}", f"{one.difference:+.4g}",
                  f"{one.low:+.4g} to {one.high:+.4g}" if isfinite(one.low) else "-", str(one.seeds))
            for one in self.differences()
        ]  # fmt: skip
        return table([titles, *rows], left=2)


def decays(
    planned: PlannedTrial,
    mixtures: Mapping[str, Mapping[str, float]],
    control: str,
    at: int,
    steps: int,
    seeds: SupportsIndex | Sequence[int],
    values: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Return, by mixture, the values that its decays change at ``at``: weights, seeds, the given ``values``, and the
    learning rate if it is not among them.

    Raises:
        UsageError: there is no such control, or the trial lacks a hyperparameter.
    """
    if control not in mixtures:
        raise UsageError(f"control is {control!r}; it must be one of the mixtures: {', '.join(map(str, mixtures))}")
    for name, mixture in mixtures.items():
        shares = mixture.values()
        if not all(isinstance(one, int | float) and 0 <= one < inf for one in shares) or not any(shares):
            raise UsageError(f"mixture {name!r} is {dict(mixture)}; its weights must be at least 0, and one above it")
    own, last = planned.schedules, max(0, min(whole(0).of("at", at), planned.steps - 1))
    weights = {MIXTURE + source for mixture in mixtures.values() for source in mixture}
    weights |= {name for name in own if name.startswith(MIXTURE)}
    check_names(planned, own, dict.fromkeys(["seed", *sorted(weights), *values]), at)
    if isinstance(seeds, SupportsIndex):
        first: Any = own["seed"].value(last)
        seeds = [first + number for number in range(whole().of("seeds", seeds))]
    if len(set(seeds)) < len(seeds) or not seeds:
        raise UsageError(f"seeds is {list(seeds)}; give different seeds, or their number")
    changes = dict(values)
    rate = "learning_rate" if "learning_rate" in own and "lr" not in own else "lr"
    if rate not in values:
        check_names(planned, own, {rate: None}, at)
        peak: Any = own[rate].value(last)
        changes[rate] = linear(peak, start_factor=1.0, end_factor=0.0, total_iters=steps)
    if several := [name for name, value in changes.items() if isinstance(value, list | tuple)]:
        raise UsageError(
            f"{several[0]} is a list; give one value, since the decays of a mixture differ only in their seed"
        )
    return {
        name: {weight: mixture.get(weight.removeprefix(MIXTURE), 0.0) for weight in sorted(weights)}
        | changes
        | {"seed": list(seeds)}
        for name, mixture in mixtures.items()
    }


def _difference(
    mixture: str, metric: str, found: Sequence[Mapping[str, float]], control: Sequence[Mapping[str, float]]
) -> MixtureDifference:
    pairs = [(one.get(metric, nan), other.get(metric, nan)) for one, other in zip(found, control, strict=True)]
    pairs = [pair for pair in pairs if all(map(isfinite, pair))]
    if not pairs:
        return MixtureDifference(mixture, metric, nan, nan, nan, nan, 0)
    differences = [one - other for one, other in pairs]
    mean, half = fmean(differences), nan
    if len(pairs) > 1:
        half = _quantile(len(pairs) - 1) * stdev(differences) / sqrt(len(pairs))
    return MixtureDifference(
        mixture, metric, fmean(one for one, _ in pairs), mean, mean - half, mean + half, len(pairs)
    )


def _quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t (the Cornish-Fisher expansion; within 0.2 %)."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )
