"""The study's own pruner decides: any of Optuna's, or one that is written to its interface."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hpstage.algorithm import Action, Algorithm, Ask, Finish, Search, Setting, Trials
from hpstage.algos.rungs import check_whole
from hpstage.errors import UsageError


@dataclass(frozen=True)
class OptunaPruner(Algorithm):
    """Trains a trial on until the study's pruner, ``optuna.create_study(pruner=...)``, gives it up.

    Trials are evaluated after ``grace`` steps, every ``interval`` steps from there on, and at the end. Each value is
    reported to the Optuna trial under the number of steps trained, and the pruner asked what ``trial.should_prune()``
    asks it. At the end it is not asked: a trial that was trained to the last step is complete. With ``window=1`` this
    is ``study.optimize`` with an objective that reports these values.

    Which pruner it is, and so what its arguments mean, is the study's business; Optuna's default is MedianPruner.
    Optuna's own examples count steps from 0, here the first is ``grace``: ``n_warmup_steps=10`` spares trials that
    were trained for less than 10 steps. Where only every ``interval``-th step is evaluated, an ``interval_steps`` of
    the pruner's is not needed.

    Synchronous: results are told in the order in which they were asked for, so that the pruner knows the same of the
    others on any cluster, and one seed gives the same search. The price is that a slow trial holds up the decisions
    about the others in the window. Optuna's HyperbandPruner deals trials to brackets by the study's name: it needs a
    ``study_name`` to decide alike twice.

    Args:
        interval: steps between evaluations, each of which may stop the trial.
        grace: steps before the first evaluation.
        window: how many trials are open at a time; at least the number of workers, to keep them busy. The wider, the
            less the pruner knows of others when it decides.
    """

    interval: int = 1
    grace: int = 1
    window: int = 16

    def check(self, setting: Setting) -> None:
        check_whole("interval", self.interval, least=1)
        check_whole("grace", self.grace, least=1)
        check_whole("window", self.window, least=1)
        if self.grace >= setting.steps:
            raise UsageError(
                f"grace is {self.grace}, but a trial has {setting.steps} steps, so that none could be pruned; lower "
                f"grace or raise steps of the study"
            )

    def evaluations(self, steps: int) -> list[int]:
        """The steps at which trials are evaluated; the last is the end."""
        return [*range(self.grace, steps, self.interval), steps]

    def start(self, setting: Setting, trials: Trials) -> Search:
        return _PrunerSearch(self.evaluations(setting.steps), self.window, trials)


class _PrunerSearch(Search):
    def __init__(self, steps: list[int], window: int, trials: Trials) -> None:
        self._steps = steps
        self._window = window
        self._trials = trials
        self._levels: dict[int, int] = {}  # of open trials: which evaluation they are asked for
        self._later: deque[int] = deque()  # trials that wait for a place in the window

    def room(self) -> int:
        return self._window - len(self._levels)

    def added(self, index: int) -> list[Action]:
        self._later.append(index)
        return self._begin()

    def told(self, index: int, step: int, value: float) -> list[Action]:
        if step == self._steps[-1]:
            return self._over(index, [Finish(index, "complete")])
        if self._trials.should_prune(index, step):
            return self._over(index, [Finish(index, "pruned")])
        self._levels[index] += 1
        return [Ask(index, self._steps[self._levels[index]])]

    def failed(self, index: int) -> list[Action]:
        return self._over(index, [])

    def _over(self, index: int, actions: list[Action]) -> list[Action]:
        del self._levels[index]
        return actions + self._begin()

    def _begin(self) -> list[Action]:
        """Ask for proposed trials, as the window allows.

        A resumed search proposes all its trials at once: those beyond the window wait, so that the pruner is asked in
        the order in which it was when the search was interrupted.
        """
        actions: list[Action] = []
        while self._later and len(self._levels) < self._window:
            index = self._later.popleft()
            self._levels[index] = 0
            actions.append(Ask(index, self._steps[0]))
        return actions
