"""Searches in rounds: the trials that continue are chosen when all trials of a round have reported."""

from __future__ import annotations

from abc import abstractmethod

from hpstage.algorithm import Action, Ask, Search


class RoundSearch(Search):
    """A search that trains ``n_trials`` trials side by side, and decides once none of them has an open target."""

    def __init__(self, n_trials: int, *, maximize: bool) -> None:
        self._n_trials = n_trials
        self._sign = -1.0 if maximize else 1.0
        self._added = 0
        self._waiting: set[int] = set()
        self._values: dict[int, float] = {}  # reported in this round
        self._closed = False

    def room(self) -> int:
        return 0 if self._closed else self._n_trials - self._added

    def added(self, index: int) -> list[Action]:
        self._added += 1
        return [self._ask(index)]

    def reported(self, index: int, step: int, value: float) -> list[Action]:
        self._waiting.remove(index)
        self._values[index] = value
        return self._decide()

    def failed(self, index: int) -> list[Action]:
        self._waiting.discard(index)
        return self._decide()

    def closed(self) -> list[Action]:
        self._closed = True
        return self._decide()

    def _ask(self, index: int) -> Ask:
        self._waiting.add(index)
        return Ask(index, self._target())

    def _decide(self) -> list[Action]:
        if self._waiting or self.room() > 0 or not self._values:
            return []
        reported, self._values = self._values, {}
        return self._round_over(reported)

    @abstractmethod
    def _target(self) -> int:
        """Return the step to which this round trains."""

    @abstractmethod
    def _round_over(self, reported: dict[int, float]) -> list[Action]:
        """Decide a round: return the actions that follow from its values, which are by trial."""
