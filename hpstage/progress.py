"""The progress line of a running search."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

from hpstage.plan import SearchPlan
from hpstage.scheduling import Scheduler

# Terminals are redrawn at most this often.
_INTERVAL = 0.2
# tqdm's own rate and time left are of trials, which end in bursts.
_FORMAT = "trials {n}/{total_fmt} |{bar}| {elapsed}{postfix}"


class Progress:
    """One line: trials finished, workers at work, steps trained of those asked for, worker-seconds saved.

    Algorithms ask for more as they learn, so the steps asked for grow. Shown when wished and when standard error is a
    terminal: silent in logs and in CI.
    """

    def __init__(self, shown: bool, study: str, n_trials: int | None) -> None:
        self._bar: tqdm | None = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(total=n_trials, dynamic_ncols=True, file=sys.stderr, bar_format=_FORMAT)
        self._drawn = 0.0
        self._study = study

    def update(self, plan: SearchPlan, scheduler: Scheduler, finished: int, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if self._bar is None or (now - self._drawn < _INTERVAL and not at_once):
            return
        self._drawn = now
        before, totals = plan.searches[self._study].before, plan.totals
        asked = totals.steps_asked - before.steps_asked
        unique = totals.steps_unique - before.steps_unique
        trained = totals.steps_trained - before.steps_trained
        saved = (asked - unique) * plan.average_step_seconds()
        self._bar.n = finished
        self._bar.set_postfix_str(
            f"workers {scheduler.running}/{len(scheduler.workers)}, steps {trained}/{unique}, "
            f"merge rate {asked / max(1, unique):.2f}, saved {saved:.0f} s",
            refresh=True,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
