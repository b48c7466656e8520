"""The study's own pruner decides: any of Optuna's, or one that is written to its interface."""

from __future__ import annotations

from dataclasses import dataclass

from hpstage.algorithm import Search, Setting, Trials
from hpstage.algos.early_stopping import EarlyStoppingAlgorithm, EarlyStoppingSearch


@dataclass(frozen=True)
class OptunaPruner(EarlyStoppingAlgorithm):
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
    about the others in the window. A decision that an interrupted call had not come to is made by the call that goes
    on, when the pruner may know more: trials may then be stopped that would have gone on, unless ``window`` is 1.
    Optuna's HyperbandPruner deals trials to brackets by the study's name: it needs a ``study_name`` to decide alike
    twice.

    Args:
        interval: steps between evaluations, each of which may stop the trial.
        grace: steps before the first evaluation.
        window: how many trials are open at a time; at least the number of workers, to keep them busy. The wider, the
            less the pruner knows of others when it decides.
    """

    interval: int = 1
    grace: int = 1
    window: int = 16

    def start(self, setting: Setting, trials: Trials) -> Search:
        return _PrunerSearch(self.evaluations(setting.steps), self.window, trials)


class _PrunerSearch(EarlyStoppingSearch):
    def __init__(self, steps: list[int], window: int, trials: Trials) -> None:
        super().__init__(steps, window)
        self._trials = trials

    def should_continue(self, index: int, level: int, value: float) -> bool:
        return level < len(self._steps) - 1 and not self._trials.should_prune(index, self._steps[level])
