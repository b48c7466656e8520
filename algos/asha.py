"""Asynchronous successive halving, ASHA (Li et al., MLSys 2020, arXiv 1810.05934)."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from hpstage.algorithm import Action, Algorithm, Ask, Finish, Search, Setting, Trials
from hpstage.algos.rungs import check_rungs, check_whole, rung_steps
from hpstage.errors import UsageError


@dataclass(frozen=True)
class ASHA(Algorithm):
    """Successive halving that never waits for a rung to fill: trials go on as soon as they are among the best so far.

    Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020 (arXiv 1810.05934), Algorithm 2.
    Rungs lie at ``min_steps * reduction_factor**k`` below the last step, and at the last step.

    ``variant="promotion"`` is the paper's: a trial pauses at each rung. Whenever a target is free, the highest rung
    is sought where one of the best ``len(rung) // reduction_factor`` trials was not yet promoted; the best such trial
    goes on to the next rung; if there is none, a new trial is proposed. Paused trials are pruned when no promotion
    can come any more. If no trial has reached the last step by then, the best trial of the highest rung goes on
    first, so that a search with few trials ends with a complete one (the paper's searches do not end).

    ``variant="stopping"`` decides once, as Optuna's and Ray's pruners do: a trial that is among the best
    ``max(1, len(rung) // reduction_factor)`` of those told at its rung so far, itself included, goes on; otherwise it
    is pruned at once. Take it with samplers that learn, which see a trial only when it has ended.

    Equal values are ranked in the order of the trials. A trial that fails keeps its places in the rungs that it
    reached.

    Asynchronous: results are told as they arrive. Which trials go on, hence what a learning sampler proposes and how
    long the search takes, may differ between runs with the number and speed of workers, and after an interruption.
    The value of a given trial at a given step never differs.

    Args:
        min_steps: steps before the first decision.
        reduction_factor: the share that goes on, as its inverse; at least 2.
        variant: do trials outside the best pause, or stop?
        window: how many targets are open at a time (the paper's workers); at least the number of workers, to keep
            them busy. More let more stages merge, and make decisions with less knowledge.
    """

    min_steps: int = 1
    reduction_factor: int = 4
    variant: Literal["promotion", "stopping"] = "promotion"
    window: int = 16

    @property
    def synchronous(self) -> bool:
        return False

    def check(self, setting: Setting) -> None:
        check_rungs(self.min_steps, self.reduction_factor, setting.steps)
        if self.variant not in ("promotion", "stopping"):
            raise UsageError(f"variant is {self.variant!r}; it must be 'promotion' or 'stopping'")
        check_whole("window", self.window, least=1)

    def rungs(self, steps: int) -> list[int]:
        """The steps at which trials are compared; the last is the end."""
        return rung_steps(self.min_steps, self.reduction_factor, steps)

    def start(self, setting: Setting, trials: Trials) -> Search:
        kind = _PromotionSearch if self.variant == "promotion" else _StoppingSearch
        return kind(self.rungs(setting.steps), self.reduction_factor, self.window, setting.maximize)


class _Rung:
    """What was told at one rung, best first; equal values in the order of the trials."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.ranked: list[tuple[float, int]] = []
        self.paused: list[tuple[float, int]] = []  # a heap of those that were not promoted

    def record(self, told: tuple[float, int]) -> int:
        """The rank of a new value, from 0."""
        rank = bisect_left(self.ranked, told)
        self.ranked.insert(rank, told)
        return rank

    def promotable(self, factor: int) -> bool:
        """Is one of the best ``1 / factor`` paused? If so, the best that is paused is."""
        return bool(self.paused) and bisect_left(self.ranked, self.paused[0]) < len(self.ranked) // factor


class _AshaSearch(Search):
    """What both variants share: rungs, and a window of open targets."""

    def __init__(self, steps: list[int], factor: int, window: int, maximize: bool) -> None:
        self._rungs = [_Rung(step) for step in steps]
        self._level = {step: level for level, step in enumerate(steps)}
        self._factor = factor
        self._window = window
        self._sign = -1.0 if maximize else 1.0
        self._open = 0

    def room(self) -> int:
        return max(0, self._window - self._open)

    def added(self, index: int) -> list[Action]:
        return [self._ask(index, 0)]

    def _ask(self, index: int, level: int) -> Ask:
        self._open += 1
        return Ask(index, self._rungs[level].step)


class _PromotionSearch(_AshaSearch):
    def __init__(self, steps: list[int], factor: int, window: int, maximize: bool) -> None:
        super().__init__(steps, factor, window, maximize)
        self._closed = False

    def told(self, index: int, step: int, value: float) -> list[Action]:
        self._open -= 1
        rung = self._rungs[self._level[step]]
        entry = (self._sign * value, index)
        rung.record(entry)
        if rung is self._rungs[-1]:
            return [Finish(index, "complete"), *self._go_on()]
        heapq.heappush(rung.paused, entry)
        return self._go_on()

    def failed(self, index: int) -> list[Action]:
        self._open -= 1
        return self._go_on()

    def closed(self) -> list[Action]:
        self._closed = True
        return self._go_on()

    def _go_on(self) -> list[Action]:
        actions: list[Action] = []
        # One result frees one target and makes at most one trial promotable: there is nothing to repeat.
        level = self._highest(promotable=True) if self._open < self._window else None
        if level is not None:
            actions.append(self._promote(level))
        if self._closed and self._open == 0:
            actions += self._conclude()
        return actions

    def _highest(self, *, promotable: bool) -> int | None:
        for level in range(len(self._rungs) - 2, -1, -1):
            rung = self._rungs[level]
            if rung.promotable(self._factor) if promotable else rung.paused:
                return level
        return None

    def _promote(self, level: int) -> Ask:
        _, index = heapq.heappop(self._rungs[level].paused)
        return self._ask(index, level + 1)

    def _conclude(self) -> list[Action]:
        level = self._highest(promotable=False)
        if level is not None and not self._rungs[-1].ranked:
            return [self._promote(level)]
        paused = sorted(index for rung in self._rungs for _, index in rung.paused)
        for rung in self._rungs:
            rung.paused.clear()
        return [Finish(index, "pruned") for index in paused]


class _StoppingSearch(_AshaSearch):
    def told(self, index: int, step: int, value: float) -> list[Action]:
        self._open -= 1
        level = self._level[step]
        if level == len(self._rungs) - 1:
            return [Finish(index, "complete")]
        rung = self._rungs[level]
        rank = rung.record((self._sign * value, index))
        if rank < max(1, len(rung.ranked) // self._factor):
            return [self._ask(index, level + 1)]
        return [Finish(index, "pruned")]

    def failed(self, index: int) -> list[Action]:
        self._open -= 1
        return []
