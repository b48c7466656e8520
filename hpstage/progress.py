"""The progress line of a running search."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

from hpstage.driver import Driver

# Terminals are redrawn at most this often.
_INTERVAL = 0.2


class Progress:
    """One line: trials finished, chains running, merge rate, share of the steps trained, worker-seconds saved.

    Shown when asked for and when standard error is a terminal: silent in logs and in CI.
    """

    def __init__(self, shown: bool, n_trials: int | None) -> None:
        self._bar: tqdm | None = None
        if shown and sys.stderr.isatty():
            self._bar = tqdm(total=n_trials, unit="trial", dynamic_ncols=True, file=sys.stderr)
        self._drawn = 0.0

    def update(self, driver: Driver, finished: int) -> None:
        now = time.monotonic()
        if self._bar is None or now - self._drawn < _INTERVAL:
            return
        self._drawn = now
        plan, scheduler = driver.plan, driver.scheduler
        seconds = plan.totals.train_seconds
        self._bar.n = finished
        self._bar.set_postfix_str(
            f"workers {scheduler.running}/{scheduler.workers}, steps {plan.totals.steps_trained}/{plan.steps_unique}, "
            f"merge rate {plan.merge_rate:.2f}, trained {seconds:.0f} s, "
            f"saved {max(0.0, (plan.merge_rate - 1) * seconds):.0f} s",
            refresh=True,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
