"""Time limits on waiting for usable workers. What happens to the chain of a worker that dies:
:mod:`hpstage.scheduler.lost_workers`."""

from __future__ import annotations

import time

from hpstage.errors import CheckpointUnreachable, ClusterError
from hpstage.scheduler.scheduler import Scheduler


class WorkerTimeout:
    """Ends the search if all workers have been gone, or unable to use the checkpoints, for too long."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._alone_since: float | None = None
        self._cut_off_since: float | None = None

    def workers_changed(self) -> None:
        self._alone_since = None if self._scheduler.workers else time.monotonic()

    def check(self, seconds: float) -> None:
        now = time.monotonic()
        trouble = self._scheduler.workers.trouble()
        if trouble is None:
            self._cut_off_since = None
        elif self._cut_off_since is None:
            self._cut_off_since = now
        elif now - self._cut_off_since > seconds and not self._scheduler.running:
            raise CheckpointUnreachable(
                f"no worker has been able to use the checkpoints for {seconds:.0f} s ({trouble}); fix that and run "
                f"the same command again: all progress is kept"
            )
        if self._alone_since is not None and now - self._alone_since > seconds:
            raise ClusterError(
                f"all workers have been gone for {seconds:.0f} s; start workers and run the same command again: "
                f"all progress is kept"
            )
