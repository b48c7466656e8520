"""Hyperband (Li et al., JMLR 18, 2018, arXiv 1603.06560): successive halving with several first rungs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Literal

from hpstage.algorithm import Action, Ask, Search, Setting, Trials
from hpstage.algos.asha import PromotionSearch
from hpstage.algos.parameters import FEW_WORKERS, RungAlgorithm, Window, known
from hpstage.algos.successive_halving import HalvingSearch
from hpstage.errors.arguments import one_of, optional, whole


@dataclass(frozen=True, slots=True)
class Bracket:
    """One successive halving of Hyperband: ``n_trials`` trials compared at ``rungs``, the last of which is the end."""

    n_trials: int
    rungs: tuple[int, ...]


@dataclass(frozen=True)
class Hyperband(RungAlgorithm):
    """Successive halvings side by side, from many trials that are halved early to few that are trained to the end.

    Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization", JMLR 18 (2018), Algorithm 1.
    With a sampler that learns, such as TPE, it is BOHB (Falkner et al., ICML 2018).

    All brackets share :class:`~hpstage.algos.SuccessiveHalving`'s rungs; each begins one rung later than the previous
    one. A bracket with ``s`` rungs after its first has ``ceil((s_max + 1) / (s + 1) * reduction_factor**s)`` trials,
    where ``s_max`` is the ``s`` of the first bracket: for 81 steps and factor 3 these are 81, 34, 15, 8 and 5, as in
    the journal's Table 1 (the code on the authors' blog rounds differently: 81, 27, 9, 6 and 5). If ``steps`` is not
    ``min_steps`` times a power of the factor, the last rung comes early; the paper would move the first. Trials are
    assigned to brackets in the order in which they are proposed, starting over after the last bracket, until
    ``n_trials`` are proposed: with fewer than ``trials_per_cycle(steps)`` the later brackets are short or missing.

    ``variant="synchronous"`` is the journal's. A rung is decided when all its trials have reported, so that one seed
    gives the same search on any cluster. With a sampler that learns, or without ``n_trials``, a cycle begins when the
    previous one is over. With more than 8 workers it begins earlier, when too few targets are left to keep them busy:
    the sampler's proposals then depend on the number of workers, unless ``window`` is given. Otherwise all cycles run
    side by side. Results are reported in the order in which they would arrive if all steps took equally long and each
    target had a worker, so that long trials do not hold up other brackets. Trials that fail leave their rung; the
    number of promotions is computed from the trials proposed, and is at least one.

    ``variant="asynchronous"`` never waits until a rung is full: each bracket is an :class:`~hpstage.algos.ASHA` in its
    promotion variant, as in the asynchronous Hyperband of Li et al., "A System for Massively Parallel Hyperparameter
    Tuning", MLSys 2020. A bracket continues over the cycles: its rungs include the trials of earlier cycles. Whenever
    fewer than ``window`` targets are open, the bracket with a possible promotion at the highest step promotes a trial
    (among several, the first bracket); if no bracket has one, a new trial is proposed. (The paper's workers look for
    promotions in one bracket at a time.) Paused trials are pruned once no further promotion is possible; if no trial
    has reached the last step by then, the best trial of the highest rung of all brackets is promoted first. A sampler
    that learns sees a trial only after its end. Results are reported as they arrive, so that runs may differ with the
    number and speed of workers, and after an interruption: in which trials continue, and hence in the proposals of a
    learning sampler and the duration of the search. The bracket of the i-th trial, and the value of a given trial at a
    given step, never differ.

    *Tree-aware* (the default): trials of a bracket that share their state at a rung are one candidate there, as
    :class:`~hpstage.algos.SuccessiveHalving` and :class:`~hpstage.algos.ASHA` explain; a bracket begins with as many
    trials as in the paper. ``tree_aware=False`` gives the paper's algorithm in any space.

    Equal values are ranked in the order of the trials.

    Args:
        min_steps: steps before the first decision of the first bracket.
        reduction_factor: the inverse of the share of trials that continue; at least 2.
        variant: whether rungs wait until they are full.
        window: for the asynchronous variant, the number of targets open at a time in all brackets together, with the
            default of :class:`~hpstage.algos.ASHA`. The synchronous variant has whole rungs open; with a sampler that
            learns, or without ``n_trials``, it begins the next cycle when fewer than ``window`` targets are open: by
            default 1 with up to 8 workers, else 16, and 4 more for each worker beyond 8.
        tree_aware: whether trials that are the same so far count as one candidate, instead of several that tie.
    """

    min_steps: int = 1
    reduction_factor: int = 3
    variant: Literal["synchronous", "asynchronous"] = "synchronous"
    window: int | None = None
    tree_aware: bool = True

    kinds = MappingProxyType(
        {**RungAlgorithm.kinds, "window": optional(whole()), "variant": one_of("synchronous", "asynchronous")}
    )

    @property
    def synchronous(self) -> bool:
        return self.variant == "synchronous"

    @property
    def by_length(self) -> bool:
        return self.synchronous  # so that a bracket of long trials does not hold up the others

    def brackets(self, steps: int) -> list[Bracket]:
        """Return the brackets of one cycle, in the order in which they are filled."""
        rungs = self.rungs(steps)
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
                Window(setting, self.window, elastic=True),
                trials,
                maximize=setting.maximize,
            )
        if setting.adaptive or setting.n_trials is None:
            ahead, admitted = _Ahead(setting, self.window), deal.cycle
        else:
            ahead, admitted = _Ahead(setting, 1), setting.n_trials
        return _HyperbandSearch(
            deal, self.reduction_factor, trials, maximize=setting.maximize, admitted=admitted, ahead=ahead
        )


class _Deal:
    """Assigns trials to brackets, which are filled one after the other, cyclically."""

    def __init__(self, brackets: list[Bracket]) -> None:
        self.brackets = brackets
        self._ends = list(accumulate(bracket.n_trials for bracket in brackets))
        self.cycle = self._ends[-1]

    def bracket_in_turn(self) -> Callable[[int], int]:
        """Return a function from trial to bracket. It assigns a trial on first use, since indices may have gaps."""
        dealt: dict[int, int] = {}
        return lambda index: dealt.setdefault(index, self.place(len(dealt))[1])

    def place(self, index: int) -> tuple[int, int]:
        """Return the cycle of a trial, and its bracket in that cycle."""
        cycle, place = divmod(index, self.cycle)
        return cycle, bisect_right(self._ends, place)


class _Ahead(Window):
    """The number of open targets below which the next cycle begins: 1 (when the last cycle is over) for few workers,
    else as many as keep the workers busy."""

    def follow(self, workers: int) -> None:
        super().follow(workers)
        self.targets = 1 if self._given is None and workers <= FEW_WORKERS else self.size


class _HyperbandSearch(Search):
    """The synchronous variant. ``admitted``: number of trials in cycles that have begun."""

    def __init__(
        self, deal: _Deal, factor: int, trials: Trials, *, maximize: bool, admitted: int, ahead: _Ahead
    ) -> None:
        self._deal = deal
        self._factor = factor
        self._trials = trials
        self._maximize = maximize
        self._admitted = admitted
        self._ahead = ahead
        self._halvings: dict[tuple[int, int], HalvingSearch] = {}
        self._added: list[int] = []
        self._places: dict[int, tuple[int, int]] = {}  # cycle and bracket of each trial whose cycle has begun
        self._requested: set[int] = set()  # trials with an open target
        self._closed = False

    def room(self) -> int:
        return 0 if self._closed else max(0, self._admitted - len(self._added))

    def added(self, index: int) -> list[Action]:
        self._added.append(index)
        return self._advance(self._begin())

    def reported(self, index: int, step: int, value: float) -> list[Action]:
        self._requested.discard(index)
        return self._advance(self._halving(index).reported(index, step, value))

    def failed(self, index: int) -> list[Action]:
        self._requested.discard(index)
        return self._advance(self._halving(index).failed(index))

    def closed(self) -> list[Action]:
        self._closed = True
        return self._advance(self._close())

    def resized(self, workers: int) -> list[Action]:
        self._ahead.follow(workers)
        return self._advance([])

    def _close(self) -> list[Action]:
        """Close the halvings, since their brackets will receive no more trials."""
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
        """Request targets of the proposed trials whose cycle has begun.

        A resumed search proposes all its trials at once: those of a later cycle wait, so that results are reported in
        the same order as in the interrupted search.
        """
        actions: list[Action] = []
        while len(self._places) < min(len(self._added), self._admitted):
            index = self._added[len(self._places)]
            self._places[index] = self._deal.place(len(self._places))
            actions += self._halving(index).added(index)
        return actions

    def _advance(self, actions: list[Action]) -> list[Action]:
        """Begin further cycles while too few targets are open. Return ``actions`` and those of the new cycles."""
        self._requested.update(action.index for action in actions if isinstance(action, Ask))
        while len(self._places) == self._admitted and len(self._requested) < self._ahead.targets:
            self._admitted += self._deal.cycle
            begun = self._begin()
            if self._closed:
                begun += self._close()
            self._requested.update(action.index for action in begun if isinstance(action, Ask))
            actions = actions + begun
        return actions
