"""Hyperband (Li et al., JMLR 18, 2018, arXiv 1603.06560): successive halving with several first rungs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Literal

from hpstage.algorithm import Action, Algorithm, Finish, Search, Setting, Trials
from hpstage.algos.asha import PromotionSearch
from hpstage.algos.parameters import window_in
from hpstage.algos.rungs import RUNGS, check_rungs, known, rung_steps
from hpstage.algos.successive_halving import HalvingSearch
from hpstage.errors.arguments import one_of, optional, switch, whole


@dataclass(frozen=True, slots=True)
class Bracket:
    """One successive halving of Hyperband: ``n_trials`` trials compared at ``rungs``, of which the last is the end."""

    n_trials: int
    rungs: tuple[int, ...]


@dataclass(frozen=True)
class Hyperband(Algorithm):
    """Successive halvings side by side, from many trials that are halved early to few that are trained to the end.

    Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization", JMLR 18 (2018), Algorithm 1.
    With a sampler that learns, such as TPE, it is BOHB (Falkner et al., ICML 2018).

    All brackets share :class:`~hpstage.algos.SuccessiveHalving`'s rungs; each begins one rung later than the previous
    one. With ``s`` rungs after its first, of ``s_max`` in the first bracket, a bracket has
    ``ceil((s_max + 1) / (s + 1) * reduction_factor**s)`` trials: for 81 steps and factor 3 these are 81, 34, 15, 8
    and 5, as in the journal's Table 1 (the code on the authors' blog rounds differently: 81, 27, 9, 6 and 5).
    If ``steps`` is not ``min_steps`` times a power of the factor, the last rung comes early; the paper would move
    the first. Trials are dealt to brackets in the order in which they are proposed, starting over after the last
    bracket, until ``n_trials`` are proposed: with fewer than ``trials_per_cycle(steps)`` the later brackets are short
    or missing.

    ``variant="synchronous"`` is the journal's. A rung is decided when all its trials have been told, so that one seed
    gives the same search on any cluster. With a sampler that learns, or without ``n_trials``, a cycle begins when the
    previous one is over; otherwise all cycles run side by side. Trials that fail leave their rung; the number of
    promotions is computed from the trials proposed, and is at least one.

    ``variant="asynchronous"`` never waits for a rung to fill: each bracket is an :class:`~hpstage.algos.ASHA` in its
    promotion variant, as in the asynchronous Hyperband of Li et al., "A System for Massively Parallel Hyperparameter
    Tuning", MLSys 2020. A bracket continues over the cycles: its rungs include the trials of earlier cycles. Whenever
    a target is free, a trial is promoted in the bracket where that is possible at the highest step, the first of
    these; if in none, a new trial is proposed (the paper's workers look for promotions in one bracket at a time).
    Paused trials are pruned once no further promotion is possible; if no trial has reached the last step by then, the
    best trial of the highest rung of all brackets is promoted first. A sampler that learns sees a trial only once it
    has ended. Results are told as they arrive: which trials continue, hence what a learning sampler proposes and how
    long the search takes, may differ between runs with the number and speed of workers, and after an interruption.
    The bracket of the i-th trial, and the value of a given trial at a given step, never differ.

    *Tree-aware* (the default): trials of a bracket that share their state at a rung are one candidate there, as
    :class:`~hpstage.algos.SuccessiveHalving` and :class:`~hpstage.algos.ASHA` explain; the number of trials that a
    bracket begins with is the paper's. ``tree_aware=False`` gives the paper's algorithm in any space.

    Equal values are ranked in the order of the trials.

    Args:
        min_steps: steps before the first decision of the first bracket.
        reduction_factor: the inverse of the share of trials that continue; at least 2.
        variant: whether rungs wait until they are full.
        window: number of targets that the asynchronous variant has open at a time in all brackets together; by default
            16, or twice the number of workers at the start of the search where these are more than 8, to keep them
            busy. The synchronous variant has whole rungs open.
        tree_aware: whether trials that are the same so far count as one candidate, instead of several that tie.
    """

    min_steps: int = 1
    reduction_factor: int = 3
    variant: Literal["synchronous", "asynchronous"] = "synchronous"
    window: int | None = None
    tree_aware: bool = True

    kinds = MappingProxyType(
        RUNGS | {"window": optional(whole()), "tree_aware": switch, "variant": one_of("synchronous", "asynchronous")}
    )

    @property
    def synchronous(self) -> bool:
        return self.variant == "synchronous"

    def check(self, setting: Setting) -> None:
        super().check(setting)
        check_rungs(self.min_steps, setting.steps)

    def brackets(self, steps: int) -> list[Bracket]:
        """Return the brackets of one cycle, in the order in which they are filled."""
        rungs = rung_steps(self.min_steps, self.reduction_factor, steps)
        return [
            Bracket(-(-len(rungs) * self.reduction_factor**s // (s + 1)), tuple(rungs[len(rungs) - 1 - s :]))
            for s in reversed(range(len(rungs)))
        ]

    def trials_per_cycle(self, steps: int) -> int:
        """Return the number of trials of all brackets together."""
        return sum(bracket.n_trials for bracket in self.brackets(steps))

    def start(self, setting: Setting, trials: Trials) -> Search:
        deal = _Deal(self.brackets(setting.steps))
        trials = known(trials, tree_aware=self.tree_aware)
        if self.variant == "asynchronous":
            return PromotionSearch(
                [bracket.rungs for bracket in deal.brackets],
                deal.bracket_in_turn(),
                self.reduction_factor,
                window_in(setting, self.window),
                trials,
                maximize=setting.maximize,
            )
        in_turn = setting.adaptive or setting.n_trials is None
        bound = None if in_turn else setting.n_trials
        return _HyperbandSearch(deal, self.reduction_factor, trials, maximize=setting.maximize, bound=bound)


class _Deal:
    """Assigns trials to brackets, which are filled one after the other, cyclically."""

    def __init__(self, brackets: list[Bracket]) -> None:
        self.brackets = brackets
        self._ends = list(accumulate(bracket.n_trials for bracket in brackets))
        self.cycle = self._ends[-1]

    def bracket_in_turn(self) -> Callable[[int], int]:
        """Return a function from trial to bracket, which deals on first use, since indices may have gaps."""
        dealt: dict[int, int] = {}
        return lambda index: dealt.setdefault(index, self.place(len(dealt))[1])

    def place(self, index: int) -> tuple[int, int]:
        """Return the cycle of a trial, and its bracket in that cycle."""
        cycle, place = divmod(index, self.cycle)
        return cycle, bisect_right(self._ends, place)


class _HyperbandSearch(Search):
    """``bound``: number of trials that may be open together; ``None`` for one cycle after the other."""

    def __init__(self, deal: _Deal, factor: int, trials: Trials, *, maximize: bool, bound: int | None) -> None:
        self._deal = deal
        self._factor = factor
        self._trials = trials
        self._maximize = maximize
        self._admitted = deal.cycle if bound is None else bound
        self._halvings: dict[tuple[int, int], HalvingSearch] = {}
        self._added: list[int] = []
        self._places: dict[int, tuple[int, int]] = {}  # for trials of open cycles; later trials wait for theirs
        self._over = 0
        self._closed = False

    def room(self) -> int:
        return 0 if self._closed else max(0, self._admitted - len(self._added))

    def added(self, index: int) -> list[Action]:
        self._added.append(index)
        return self._begin()

    def told(self, index: int, step: int, value: float) -> list[Action]:
        return self._count(self._halving(index).told(index, step, value))

    def failed(self, index: int) -> list[Action]:
        self._over += 1
        return self._count(self._halving(index).failed(index))

    def closed(self) -> list[Action]:
        self._closed = True
        return self._count(self._close())

    def _close(self) -> list[Action]:
        """Close the halvings, whose brackets will receive no more trials."""
        return [action for halving in list(self._halvings.values()) for action in halving.closed()]

    def _halving(self, index: int) -> HalvingSearch:
        place = self._places[index]
        if place not in self._halvings:
            bracket = self._deal.brackets[place[1]]
            self._halvings[place] = HalvingSearch(
                list(bracket.rungs), self._factor, bracket.n_trials, self._trials, maximize=self._maximize
            )
        return self._halvings[place]

    def _begin(self) -> list[Action]:
        """Ask for proposed and admitted trials.

        A resumed search proposes all its trials at once: those of a later cycle wait, so that results are told in the
        same order as in the interrupted search.
        """
        actions: list[Action] = []
        while len(self._places) < min(len(self._added), self._admitted):
            index = self._added[len(self._places)]
            self._places[index] = self._deal.place(len(self._places))
            actions += self._halving(index).added(index)
        return actions

    def _count(self, actions: list[Action]) -> list[Action]:
        """Open the next cycle if the actions end this one."""
        self._over += sum(isinstance(action, Finish) for action in actions)
        if self._over == self._admitted:
            self._admitted += self._deal.cycle
            self._halvings.clear()
            actions = [*actions, *self._begin()]
            if self._closed:
                actions += self._close()
        return actions
