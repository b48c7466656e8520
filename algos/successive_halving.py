"""Synchronous successive halving (Jamieson and Talwalkar, AISTATS 2016, arXiv 1502.07943)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from hpstage.algorithm import Action, Ask, Finish, Search, Setting, Trials
from hpstage.algos.parameters import RungAlgorithm, known
from hpstage.algos.rounds import RoundSearch
from hpstage.errors import UsageError


@dataclass(frozen=True)
class SuccessiveHalving(RungAlgorithm):
    """Trains all trials to ``min_steps``, the best ``1 / reduction_factor`` of them ``reduction_factor`` times as far,
    and so on, until the best are trained to the last step.

    Rungs lie at ``min_steps * reduction_factor**k`` below the last step, and at the last step. Synchronous: a rung
    is decided when all its trials have reported, so that one seed gives the same search on any cluster. Equal
    values are ranked in the order of the trials. Trials that fail leave their rung; the number of promotions is
    computed from the trials proposed, and is at least one.

    *Tree-aware* (the default): trials that share their state at a rung, since they were trained with the same values up
    to it, are one *candidate* there. Candidates are ranked and counted instead of trials, and a candidate is promoted
    with all of its trials, which do not differ yet. The paper's rule treats trials as independent draws. In a discrete
    space many trials begin the same and tie; under that rule, copies of one state, chosen only by their numbers, would
    fill the places of a rung. Tree-aware, more trials may continue than in the paper, which costs little while they
    share their training. The next rung counts the candidates into which the promoted ones have diverged by then; places
    left empty by failures on one rung are added to those on the next. If all trials are different, the two rules
    coincide. ``tree_aware=False`` gives the paper's algorithm in any space.

    Args:
        min_steps: steps before the first decision.
        reduction_factor: the inverse of the share of trials that continue; at least 2.
        tree_aware: whether trials that are the same so far count as one candidate, instead of several that tie.
    """

    min_steps: int = 1
    reduction_factor: int = 4
    tree_aware: bool = True

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if setting.n_trials is None:
            raise UsageError("SuccessiveHalving compares a fixed number of trials; give n_trials")

    def start(self, setting: Setting, trials: Trials) -> Search:
        assert setting.n_trials is not None
        return HalvingSearch(
            self.rungs(setting.steps),
            self.reduction_factor,
            setting.n_trials,
            known(trials, tree_aware=self.tree_aware),
            maximize=setting.maximize,
        )


class HalvingSearch(RoundSearch):
    """One successive halving of ``n_trials`` trials, of any indices, in terms of the candidates that ``trials``
    distinguishes."""

    def __init__(self, rungs: list[int], factor: int, n_trials: int, trials: Trials, *, maximize: bool) -> None:
        super().__init__(n_trials, maximize=maximize)
        self._rungs = rungs
        self._factor = factor
        self._trials = trials
        self._rung = 0
        self._requested: list[int] = []  # trials at this rung, including failed ones
        self._vacant = 0  # places at this rung that no trial was left to fill

    def _target(self) -> int:
        return self._rungs[self._rung]

    def _ask(self, index: int) -> Ask:
        self._requested.append(index)
        return super()._ask(index)

    def _round_over(self, reported: dict[int, float]) -> list[Action]:
        indices = sorted(reported)
        if self._rung == len(self._rungs) - 1:
            return [Finish(index, "complete") for index in indices]
        promoted = self._promoted(reported)
        self._requested = []
        self._rung += 1
        pruned: list[Action] = [Finish(index, "pruned") for index in indices if index not in promoted]
        return pruned + [self._ask(index) for index in indices if index in promoted]

    def _promoted(self, values: dict[int, float]) -> set[int]:
        candidates: dict[Hashable, list[int]] = {}
        for index in sorted(self._requested):
            candidates.setdefault(self._trials.prefix(index, self._rungs[self._rung]), []).append(index)
        # With as many candidates as trials, n // factor**k of n trials reach rung k, regardless of failures.
        places = max(1, (len(candidates) + self._vacant) // self._factor)
        alive = [of for one in candidates.values() if (of := [index for index in one if index in values])]
        alive.sort(key=lambda one: (self._sign * values[one[0]], one[0]))
        self._vacant = max(0, places - len(alive))
        return {index for one in alive[:places] for index in one}
