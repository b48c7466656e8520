"""Full training of every trial. With Optuna's samplers: grid search, random search, TPE, ..."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from hpstage.algorithm import Action, Algorithm, Ask, Finish, Search, Setting, Trials
from hpstage.algos.parameters import check_whole

# Trials open at a time with a sampler that learns: enough to keep several workers busy and to merge stages.
_LEARNING_WINDOW = 16


@dataclass(frozen=True)
class FullTraining(Algorithm):
    """Trains every trial to the last step.

    Synchronous: a trial is proposed when the one ``window`` places before it has been told, regardless of the number
    of workers, so that one seed gives the same trials on any cluster.

    Args:
        window: number of trials open at a time. ``None``: all of them if the sampler ignores results (grid,
            brute force, random, quasi-random), else 16. Where all trials are enqueued, give their number, or a
            sampler that ignores results.
    """

    window: int | None = None

    @property
    def multi_objective(self) -> bool:
        return True

    def check(self, setting: Setting) -> None:
        if self.window is not None:
            check_whole("window", self.window, least=1)

    def start(self, setting: Setting, trials: Trials) -> Search:
        window = self.window
        if window is None:
            bounded = setting.n_trials is not None and not setting.adaptive
            window = sys.maxsize if bounded else _LEARNING_WINDOW
        return _FullTrainingSearch(setting.steps, window)


class _FullTrainingSearch(Search):
    def __init__(self, steps: int, window: int) -> None:
        self._steps = steps
        self._window = window
        self._open = 0

    def room(self) -> int:
        return self._window - self._open

    def added(self, index: int) -> list[Action]:
        self._open += 1
        return [Ask(index, self._steps)]

    def told(self, index: int, step: int, value: float) -> list[Action]:
        self._open -= 1
        return [Finish(index, "complete")]

    def failed(self, index: int) -> list[Action]:
        self._open -= 1
        return []
