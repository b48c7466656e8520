"""Full training of every trial. With Optuna's samplers: grid search, random search, TPE, ..."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from hpstage.algorithm import Action, Algorithm, Finish, Search, Setting, Trials
from hpstage.algos.parameters import MOST, Window, WindowedSearch
from hpstage.errors.arguments import optional, whole


@dataclass(frozen=True)
class FullTraining(Algorithm):
    """Trains every trial to the last step.

    Synchronous: a trial is proposed when the trial ``window`` places before it has reported, even if others are
    trained earlier, so that one seed gives the same trials in every run.

    Args:
        window: number of trials open at a time. ``None``: all of them, up to 4,096, if the sampler ignores results
            (grid, brute force, random, quasi-random); else 16, and 4 more for each worker beyond 8, to keep them busy.
            It grows and shrinks with the number of workers, so that a sampler that learns proposes other trials on
            clusters of other sizes; with a number, one seed gives the same trials on any cluster. The larger the
            window, the fewer results a sampler knows when it proposes. If all trials are enqueued, give their number,
            or a sampler that ignores results.
    """

    window: int | None = None

    kinds = MappingProxyType({"window": optional(whole())})

    @property
    def multi_objective(self) -> bool:
        return True

    def start(self, setting: Setting, trials: Trials) -> Search:
        endless = self.window is None and setting.n_trials is not None and not setting.adaptive
        return _FullTrainingSearch(setting.steps, Window(setting, MOST if endless else self.window))


class _FullTrainingSearch(WindowedSearch):
    def __init__(self, steps: int, window: Window) -> None:
        super().__init__(window)
        self._steps = steps

    def added(self, index: int) -> list[Action]:
        return [self._ask(index, self._steps)]

    def reported(self, index: int, step: int, value: float) -> list[Action]:
        self._open -= 1
        return [Finish(index, "complete")]
