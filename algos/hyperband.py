"""Hyperband (Li et al., JMLR 18, 2018, arXiv 1603.06560): successive halving with several first rungs."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from hpstage.algorithm import Action, Algorithm, Finish, Search, Setting, Trials
from hpstage.algos.rungs import check_rungs, rung_steps
from hpstage.algos.successive_halving import HalvingSearch


@dataclass(frozen=True, slots=True)
class Bracket:
    """One successive halving of Hyperband: ``n_trials`` that are compared at ``rungs``, the last of them the end."""

    n_trials: int
    rungs: tuple[int, ...]


@dataclass(frozen=True)
class Hyperband(Algorithm):
    """Successive halvings side by side, from many trials that are halved early to few that are trained to the end.

    Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization", JMLR 18 (2018), Algorithm 1.
    With a sampler that learns, such as TPE, it is BOHB (Falkner et al., ICML 2018).

    All brackets share :class:`~hpstage.algos.SuccessiveHalving`'s rungs; each begins one rung later than the one
    before. With ``s`` rungs after its first, of ``s_max`` in the first bracket, a bracket has
    ``ceil((s_max + 1) / (s + 1) * reduction_factor**s)`` trials: for 81 steps and factor 3 these are 81, 34, 15, 8
    and 5, as in the journal's Table 1 (the code on the authors' blog rounds otherwise: 81, 27, 9, 6 and 5).
    Where ``steps`` is not ``min_steps`` times a power of the factor, the last rung comes early; the paper would move
    the first.

    Trials are dealt to brackets in the order in which they are proposed. After the last bracket it begins again,
    until ``n_trials`` were proposed: with fewer than ``trials_per_cycle(steps)`` the later brackets are short or
    missing. Under a sampler that learns, or without ``n_trials``, a cycle begins when the one before is over; else
    all cycles run side by side.

    Synchronous: a rung is decided when all its trials have been told, so that one seed gives the same search on any
    cluster. Equal values are ranked in the order of the trials. Trials that fail leave their rung; what is promoted
    is counted from the trials that were proposed, and at least one is.

    Args:
        min_steps: steps before the first decision of the first bracket.
        reduction_factor: the share that goes on, as its inverse; at least 2.
    """

    min_steps: int = 1
    reduction_factor: int = 3

    def check(self, setting: Setting) -> None:
        check_rungs(self.min_steps, self.reduction_factor, setting.steps)

    def brackets(self, steps: int) -> list[Bracket]:
        """The brackets of one cycle, in the order in which they are filled."""
        rungs = rung_steps(self.min_steps, self.reduction_factor, steps)
        return [
            Bracket(-(-len(rungs) * self.reduction_factor**s // (s + 1)), tuple(rungs[len(rungs) - 1 - s :]))
            for s in reversed(range(len(rungs)))
        ]

    def trials_per_cycle(self, steps: int) -> int:
        """Trials of all brackets together."""
        return sum(bracket.n_trials for bracket in self.brackets(steps))

    def start(self, setting: Setting, trials: Trials) -> Search:
        in_turn = setting.adaptive or setting.n_trials is None
        return _HyperbandSearch(
            self.brackets(setting.steps),
            self.reduction_factor,
            setting.maximize,
            bound=None if in_turn else setting.n_trials,
        )


class _HyperbandSearch(Search):
    """``bound``: how many trials may be open together; ``None`` for one cycle after the other."""

    def __init__(self, brackets: list[Bracket], factor: int, maximize: bool, *, bound: int | None) -> None:
        self._brackets = brackets
        self._factor = factor
        self._maximize = maximize
        self._ends = list(accumulate(bracket.n_trials for bracket in brackets))
        self._cycle = self._ends[-1]
        self._admitted = self._cycle if bound is None else bound
        self._halvings: dict[tuple[int, int], HalvingSearch] = {}
        self._added = 0
        self._begun = 0  # trials of open cycles; those after them wait for their cycle
        self._over = 0
        self._closed = False

    def room(self) -> int:
        return 0 if self._closed else max(0, self._admitted - self._added)

    def added(self, index: int) -> list[Action]:
        self._added += 1
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
        """The brackets that are not full will not become so."""
        return [action for halving in list(self._halvings.values()) for action in halving.closed()]

    def _halving(self, index: int) -> HalvingSearch:
        cycle, place = divmod(index, self._cycle)
        number = bisect_right(self._ends, place)
        if (cycle, number) not in self._halvings:
            bracket = self._brackets[number]
            self._halvings[cycle, number] = HalvingSearch(
                list(bracket.rungs), self._factor, bracket.n_trials, self._maximize
            )
        return self._halvings[cycle, number]

    def _begin(self) -> list[Action]:
        """Ask for the trials that were proposed and admitted.

        A resumed search proposes all its trials at once: those of a later cycle wait, so that it is told in the order
        in which the search that was interrupted was.
        """
        actions: list[Action] = []
        while self._begun < min(self._added, self._admitted):
            actions += self._halving(self._begun).added(self._begun)
            self._begun += 1
        return actions

    def _count(self, actions: list[Action]) -> list[Action]:
        """Open the next cycle if the actions end this one."""
        self._over += sum(isinstance(action, Finish) for action in actions)
        if self._over == self._admitted:
            self._admitted += self._cycle
            self._halvings.clear()
            actions = [*actions, *self._begin()]
            if self._closed:
                actions += self._close()
        return actions
