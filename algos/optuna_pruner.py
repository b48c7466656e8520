"""Stopping by the study's own pruner: any of Optuna's, or one that implements its interface."""

from __future__ import annotations

from dataclasses import dataclass

from hpstage.algorithm import Search, Setting, Trials
from hpstage.algos.early_stopping import EarlyStoppingAlgorithm, EarlyStoppingSearch


@dataclass(frozen=True)
class OptunaPruner(EarlyStoppingAlgorithm):
    """Trains a trial until the study's pruner, ``optuna.create_study(pruner=...)``, prunes it.

    Trials are evaluated after ``grace`` steps, every ``interval`` steps from there on, and at the end. Each value is
    reported to the Optuna trial under the number of steps trained, and the pruner is called as by
    ``trial.should_prune()``. At the end it is not called: a trial trained to the last step is complete. With
    ``window=1``, the default, this is ``study.optimize`` with an objective that reports these values: the pruner knows
    the results of all earlier trials. A larger window keeps more workers busy, but fewer trials are pruned: of 27, for
    example, 7 with ``window=16`` and a MedianPruner, instead of 16.

    A NaN value is reported, too: most pruners ignore it, a ThresholdPruner prunes the trial. At the end it fails the
    trial.

    The pruner, and so the meaning of its arguments, is set on the study; Optuna's default is MedianPruner.
    Optuna's own examples count steps from 0, here the first is ``grace``: ``n_warmup_steps=10`` spares trials
    trained for less than 10 steps. Since only every ``interval``-th step is evaluated, the pruner's
    ``interval_steps`` is not needed.

    Synchronous: results are reported in the order in which they were requested, so that the pruner sees the same
    results on any cluster, and one seed gives the same search. The price is that a slow trial delays the decisions
    about the others in the window. If an interrupted call has not made a decision, the call that resumes it does, when
    the pruner may know more results: unless ``window`` is 1, it may then stop trials that would have continued.
    Optuna's HyperbandPruner assigns trials to brackets by the study's name: it needs a ``study_name`` for reproducible
    decisions.

    Args:
        interval: steps between evaluations, each of which may stop the trial.
        grace: steps before the first evaluation.
        window: number of trials open at a time: set it to the number of workers, to keep them busy. The larger it is,
            the fewer results of others the pruner knows when it decides.
    """

    interval: int = 1
    grace: int = 1
    window: int = 1

    @property
    def takes_nan(self) -> bool:
        return True

    def start(self, setting: Setting, trials: Trials) -> Search:
        return _PrunerSearch(self.evaluations(setting.steps), self.window, trials)


class _PrunerSearch(EarlyStoppingSearch):
    def __init__(self, steps: list[int], window: int, trials: Trials) -> None:
        super().__init__(steps, window)
        self._trials = trials

    def should_continue(self, index: int, level: int, value: float) -> bool:
        return level < len(self._steps) - 1 and not self._trials.should_prune(index, self._steps[level])
