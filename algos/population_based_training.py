"""Population-based training (Jaderberg et al. 2017, arXiv 1711.09846)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from types import MappingProxyType
from typing import Any

from hpstage.algorithm import Action, Algorithm, Finish, Fork, Search, Setting, Trials
from hpstage.algos.explore import explore, pick
from hpstage.algos.rounds import RoundSearch
from hpstage.errors import UsageError
from hpstage.errors.arguments import number, several, whole

# How often parameters that the space rejects are drawn again before the donor's parameters are kept.
_REDRAWS = 10


@dataclass(frozen=True)
class PopulationBasedTraining(Algorithm):
    """Trains a population side by side; every few steps, forks of the best trials with other hyperparameters replace
    the worst.

    Jaderberg et al., "Population Based Training of Neural Networks", arXiv 1711.09846, Algorithm 1, with the
    *exploit* and *explore* of section 4.1.1: truncation selection, perturbing and resampling.

    ``n_trials`` trials are the population. Every ``interval`` steps, when all have reported, the worst ``quantile`` of
    them are pruned. Each is replaced by a new trial, in addition to ``n_trials``: a fork of a *donor* drawn from the
    best ``quantile``, which equals the donor up to that step and has explored parameters from there on. A member is
    therefore an ordinary trial whose schedules contain the history of all its donors, and the best one can be
    retrained, with the same result, from its schedules alone. At the last step the population is complete.

    A quantile is rounded up, and is at most half of the population. Equal values are ranked in the order of the
    trials. A failed member counts as worse than all others and is replaced at the next round, even if more members
    failed than are in the quantile; if all have failed, the search is over.

    Exploring resamples a parameter from its distribution, or multiplies it by one of the factors and clips it to its
    range. Integers and values with steps move by at least one step, a choice among numbers to the next larger or
    smaller one; other choices change only when resampled. Exploring a parameter that acts only before the fork has no
    effect. If a range depends on other parameters, the range in the fork applies. If the space rejects the explored
    parameters (``raise optuna.TrialPruned``), they are explored again, up to ten times; then the donor's are kept.

    Synchronous, as in Ray Tune with ``synch=True``: a round is decided when all its members have reported, so that one
    seed gives the same search on any cluster, at the price that a round takes as long as its slowest member. (In the
    paper, each member is compared with the last reports of the others as soon as it is ready.) Random draws depend only
    on the seed, the round and the member's place.

    Args:
        interval: steps between rounds (the paper's *ready*; Ray's ``perturbation_interval``).
        quantile: the share of members that are replaced, and the share that are donors; above 0, at most 0.5 (Ray's
            ``quantile_fraction``). The default is the paper's; Ray's is 0.25.
        perturbation_factors: the factors for a value, equally likely. The default is the paper's and Ray's.
        resample_probability: the probability that a parameter is resampled instead. The default is Ray's.
        seed: the seed of all random draws.
    """

    interval: int
    quantile: float = 0.2
    perturbation_factors: tuple[float, ...] = (0.8, 1.2)
    resample_probability: float = 0.25
    seed: int = 0

    kinds = MappingProxyType(
        {
            "interval": whole(),
            "quantile": number(above=0, most=0.5),
            "perturbation_factors": several(
                number(above=0), "positive numbers, such as (0.8, 1.2)", least=1, single=False
            ),
            "resample_probability": number(least=0, most=1),
            "seed": whole(0),
        }
    )

    @property
    def forks(self) -> bool:
        return True

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if self.interval >= setting.steps:
            raise UsageError(
                f"interval is {self.interval}, but a trial has only {setting.steps} steps: none could be replaced. "
                f"Lower interval or raise steps"
            )
        if setting.n_trials is None or setting.n_trials < 2:
            raise UsageError(
                f"n_trials is {setting.n_trials}; the population of PopulationBasedTraining needs 2 or more"
            )

    def rounds(self, steps: int) -> list[int]:
        """Return the steps at which the population is compared; the last is the end."""
        return [*range(self.interval, steps, self.interval), steps]

    def start(self, setting: Setting, trials: Trials) -> Search:
        return _PopulationSearch(self, setting, trials)


class _PopulationSearch(RoundSearch):
    """Members keep their places: a fork takes the place of the trial that it replaces."""

    def __init__(self, algorithm: PopulationBasedTraining, setting: Setting, trials: Trials) -> None:
        assert setting.n_trials is not None
        super().__init__(setting.n_trials, maximize=setting.maximize)
        self._algorithm = algorithm
        self._trials = trials
        self._steps = algorithm.rounds(setting.steps)
        self._round = 0
        self._members: list[int] = []
        self._vacant: deque[int] = deque()  # places of the requested forks, in order

    def added(self, index: int) -> list[Action]:
        self._members.append(index)
        return super().added(index)

    def forked(self, index: int, fork: Fork) -> list[Action]:
        self._members[self._vacant.popleft()] = index
        return [self._ask(index)]

    def _target(self) -> int:
        return self._steps[self._round]

    def _round_over(self, reported: dict[int, float]) -> list[Action]:
        if self._round == len(self._steps) - 1:
            return [Finish(index, "complete") for index in sorted(reported)]
        best, worst = self._select(reported)
        decided, self._round = self._round, self._round + 1
        actions: list[Action] = []
        for place, index in enumerate(self._members):
            if index in reported and index not in worst:
                actions.append(self._ask(index))
                continue
            if index in reported:
                actions.append(Finish(index, "pruned"))
            actions.append(self._fork(best, decided, place))
            self._vacant.append(place)
        return actions

    def _select(self, reported: dict[int, float]) -> tuple[list[int], set[int]]:
        """Select by truncation: return the donors, and the reported members to be replaced."""
        size = len(self._members)
        # Computed in decimal: as a product of floats, 7 % of 100 is more than 7.
        count = min(math.ceil(Fraction(str(self._algorithm.quantile)) * size), size // 2)
        ranked = sorted(reported, key=lambda index: (self._sign * reported[index], index))
        failed = size - len(ranked)
        return ranked[:count], set(ranked[len(ranked) - max(0, count - failed) :])

    def _fork(self, donors: list[int], decided: int, place: int) -> Fork:
        algorithm = self._algorithm
        rng = Random(f"{algorithm.seed}/{decided}/{place}")
        donor = pick(donors, rng)
        params = self._trials.params(donor)
        explored = [
            explore(
                params,
                perturbation_factors=algorithm.perturbation_factors,
                resample_probability=algorithm.resample_probability,
                rng=rng,
            )
            for _ in range(1 + _REDRAWS)
        ]
        tried: list[Mapping[str, Any]] = []
        for one in (*explored, {name: value for name, (value, _) in params.items()}):
            if one not in tried:
                tried.append(one)
        return Fork(donor, self._steps[decided], tried[0], tuple(tried[1:]))
