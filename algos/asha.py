"""Asynchronous successive halving, ASHA (Li et al., MLSys 2020, arXiv 1810.05934)."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from hpstage.algorithm import Action, Ask, Finish, Search, Setting, Trials
from hpstage.algos.parameters import RungAlgorithm, Window, WindowedSearch, known
from hpstage.errors.arguments import one_of, optional, whole


@dataclass(frozen=True)
class ASHA(RungAlgorithm):
    """Successive halving that never waits until a rung is full: trials continue once they are among the best so far.

    Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020 (arXiv 1810.05934), Algorithm 2.
    Rungs lie at ``min_steps * reduction_factor**k`` below the last step, and at the last step.

    ``variant="promotion"`` is the paper's: a trial pauses at each rung. A trial can be promoted if it is among the best
    ``len(rung) // reduction_factor`` of its rung. Whenever fewer than ``window`` targets are open, the best such trial
    of the highest rung that has one is promoted to the next rung; if no rung has one, a new trial is proposed. Paused
    trials are pruned once no further promotion is possible. If no trial has reached the last step by then, the best
    trial of the highest rung is promoted first (of the best candidate, as many trials as the window holds), so that a
    search with few trials ends with a complete one (the paper's searches do not end).

    ``variant="stopping"`` decides once, as Optuna's and Ray's pruners do: a trial among the best
    ``max(1, len(rung) // reduction_factor)`` of those reported at its rung so far, itself included, continues;
    otherwise it is pruned at once. Use it with samplers that learn, which see a trial only after its end.

    *Tree-aware* (the default): trials that share their state at a rung, since they were trained with the same values up
    to it, are one *candidate* there, whose value is the one reported first. A rung ranks and counts candidates instead
    of trials. All paused trials of a candidate among the best may be promoted, one after the other as the window
    allows; so may trials that reach the rung later, if their candidate is among the best then. The paper's rule treats
    trials as independent draws. In a discrete space many trials begin the same and tie under that rule: copies of one
    good state fill the best places of a rung, and copies of a bad one enlarge the rung, so that worse trials continue.
    More or fewer trials may therefore continue than in the paper. If all trials are different, the two rules coincide.
    ``tree_aware=False`` gives the paper's algorithm in any space.

    Equal values are ranked in the order of the trials (for candidates, of the trials reported first). A trial that
    fails keeps its places in the rungs that it reached.

    Asynchronous: results are reported as they arrive. Runs may differ with the number and speed of workers, and after
    an interruption: in which trials continue, and hence in the proposals of a learning sampler and the duration of the
    search. The value of a given trial at a given step never differs.

    Args:
        min_steps: steps before the first decision.
        reduction_factor: the inverse of the share of trials that continue; at least 2.
        variant: whether trials outside the best pause or stop.
        window: number of targets open at a time (the paper's workers). By default 16, and one more for each current
            worker beyond 8; up to twice as many while workers have nothing to do. With a larger window more stages can
            merge, but decisions are based on less information.
        tree_aware: whether trials that are the same so far count as one candidate, instead of several that tie.
    """

    min_steps: int = 1
    reduction_factor: int = 4
    variant: Literal["promotion", "stopping"] = "promotion"
    window: int | None = None
    tree_aware: bool = True

    kinds = MappingProxyType(
        {**RungAlgorithm.kinds, "window": optional(whole()), "variant": one_of("promotion", "stopping")}
    )

    @property
    def synchronous(self) -> bool:
        return False

    def start(self, setting: Setting, trials: Trials) -> Search:
        rungs, trials = self.rungs(setting.steps), known(trials, tree_aware=self.tree_aware)
        window = Window(setting, self.window, elastic=True)
        if self.variant == "stopping":
            return _StoppingSearch(rungs, self.reduction_factor, window, trials, maximize=setting.maximize)
        return PromotionSearch(
            [rungs], lambda index: 0, self.reduction_factor, window, trials, maximize=setting.maximize
        )


# A candidate's place in a rung: its value, with sign such that less is better, and the first trial reported.
_Place = tuple[float, int]


class _Rung:
    """One rung: its candidates, best first, and the trials that wait for promotion."""

    def __init__(self, step: int, trials: Trials) -> None:
        self.step = step
        self._trials = trials
        self._ranked: list[_Place] = []
        self._places: dict[Hashable, _Place] = {}
        self.paused: list[tuple[_Place, int]] = []  # a heap

    def record(self, index: int, value: float) -> _Place:
        """Return the place of a trial's candidate, recording it if it is new."""
        prefix = self._trials.prefix(index, self.step)
        if prefix not in self._places:
            place = self._places[prefix] = (value, index)
            self._ranked.insert(bisect_left(self._ranked, place), place)
        return self._places[prefix]

    def among_the_best(self, place: _Place, factor: int, *, least: int) -> bool:
        """Whether the place is among the best ``1 / factor`` of the candidates, or among the best ``least``."""
        return bisect_left(self._ranked, place) < max(least, len(self._ranked) // factor)

    def promotable(self, factor: int) -> bool:
        """Whether a trial of one of the best candidates is waiting. The first waiting trial is always the best one."""
        return bool(self.paused) and self.among_the_best(self.paused[0][0], factor, least=0)


class PromotionSearch(WindowedSearch):
    """Algorithm 2 of ASHA's paper, in one or several brackets that share a window. When the window has room, a trial is
    promoted in the bracket with a possible promotion at the highest step (among several, in the first bracket).

    ``brackets``: the rungs of each bracket; the last rung is the trials' last step, the same for all brackets.
    ``bracket_of``: returns the bracket of a trial.
    """

    def __init__(
        self,
        brackets: Sequence[Sequence[int]],
        bracket_of: Callable[[int], int],
        factor: int,
        window: Window,
        trials: Trials,
        *,
        maximize: bool,
    ) -> None:
        super().__init__(window)
        self._brackets = brackets
        self._bracket_of = bracket_of
        self._factor = factor
        self._sign = -1.0 if maximize else 1.0
        self._end = brackets[0][-1]
        self._rungs = {(b, step): _Rung(step, trials) for b, steps in enumerate(brackets) for step in steps[:-1]}
        self._downwards = sorted(self._rungs, key=lambda rung: (-rung[1], rung[0]))
        self._above = {(b, low): high for b, steps in enumerate(brackets) for low, high in pairwise(steps)}
        self._completed = False
        self._closed = False

    def added(self, index: int) -> list[Action]:
        return [self._ask(index, self._brackets[self._bracket_of(index)][0])]

    def reported(self, index: int, step: int, value: float) -> list[Action]:
        self._open -= 1
        if step == self._end:
            self._completed = True
            return [Finish(index, "complete"), *self._go_on()]
        rung = self._rungs[self._bracket_of(index), step]
        heapq.heappush(rung.paused, (rung.record(index, self._sign * value), index))
        return self._go_on()

    def closed(self) -> list[Action]:
        self._closed = True
        return self._go_on()

    def _go_on(self) -> list[Action]:
        actions: list[Action] = []
        # After one result, a candidate with many trials may be among the best.
        while self._open < self._window.size and (where := self._promotable()) is not None:
            actions.append(self._promote(where))
        if self._closed and self._open == 0:
            actions += self._conclude()
        return actions

    def _promotable(self) -> tuple[int, int] | None:
        return next((where for where in self._downwards if self._rungs[where].promotable(self._factor)), None)

    def _promote(self, where: tuple[int, int]) -> Ask:
        _, index = heapq.heappop(self._rungs[where].paused)
        return self._ask(index, self._above[where])

    def _conclude(self) -> list[Action]:
        """End the search once nothing is promotable, but not without a complete trial."""
        waiting = [where for where in self._downwards if self._rungs[where].paused]
        if waiting and not self._completed:
            highest = [where for where in waiting if where[1] == waiting[0][1]]
            best = min(highest, key=lambda where: self._rungs[where].paused[0])
            paused, (place, _) = self._rungs[best].paused, self._rungs[best].paused[0]
            actions: list[Action] = []
            while paused and paused[0][0] == place and self._open < self._window.size:
                actions.append(self._promote(best))
            return actions
        ended = sorted(index for where in waiting for _, index in self._rungs[where].paused)
        for where in waiting:
            self._rungs[where].paused.clear()
        return [Finish(index, "pruned") for index in ended]


class _StoppingSearch(WindowedSearch):
    def __init__(self, rungs: list[int], factor: int, window: Window, trials: Trials, *, maximize: bool) -> None:
        super().__init__(window)
        self._rungs = {step: _Rung(step, trials) for step in rungs[:-1]}
        self._first = rungs[0]
        self._above = dict(pairwise(rungs))
        self._factor = factor
        self._sign = -1.0 if maximize else 1.0

    def added(self, index: int) -> list[Action]:
        return [self._ask(index, self._first)]

    def reported(self, index: int, step: int, value: float) -> list[Action]:
        if step not in self._rungs:
            self._open -= 1
            return [Finish(index, "complete")]
        rung = self._rungs[step]
        if rung.among_the_best(rung.record(index, self._sign * value), self._factor, least=1):
            return [Ask(index, self._above[step])]
        self._open -= 1
        return [Finish(index, "pruned")]
