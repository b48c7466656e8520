"""Adaptive scaling: Dask's scheduler answers with the number of workers that searches can use.

``cluster.adapt()`` requests this number over its connection. The autoscaler of Dask's Kubernetes operator requests it
by ``GET /api/v1/adaptive_target``, or also over a connection. Dask's own answer is based on the tasks that wait for a
worker, but tasks of a search never wait: each is pinned to an idle worker. The scheduler decides which workers leave,
those without a task first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from distributed import Client, Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from hpstage.cluster.private import is_fixed

logger = logging.getLogger("hpstage")

_TOPIC = "hpstage-demand"
_INTERVAL = 1.0
"""Seconds between two computations of the demand. Dask reads the scheduler's answer at the same interval."""
_SHARE = 0.02
"""Maximum share of the driver's time for computing the demand, by simulating all trials to their end."""
_LONGEST = 600.0
"""A worker that joins later than this many seconds after a request does not count as the requested one."""


class AdaptiveTarget(SchedulerPlugin):  # type: ignore[misc]
    """A scheduler plugin that answers adaptive scaling with the number of workers that searches can use, or with Dask's
    own estimate for all tasks if that is larger.

    The plugin remains installed, but answers only while a search is connected.
    """

    name = "hpstage-adaptive"
    idempotent = True

    def start(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._own = scheduler.adaptive_target
        self._demands: dict[str, int] = {}

    def log_event(self, topic: str, msg: Any) -> None:
        if topic == _TOPIC and msg["client"] in self._scheduler.clients:
            self._demands[msg["client"]] = msg["workers"]
            self._answer_by(self._target)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        self._demands.pop(client, None)
        if not self._demands:
            self._answer_by(self._own)

    def _answer_by(self, target: Callable[..., int]) -> None:
        self._scheduler.adaptive_target = target  # for HTTP
        self._scheduler.handlers["adaptive_target"] = target

    def _target(self, target_duration: Any = None) -> int:
        # Dask's estimate includes workers with tasks of searches, but no further workers that searches could use.
        return int(max(self._own(target_duration), sum(self._demands.values())))


class DemandFeed:
    """Reports to the scheduler how many workers a search can use, and measures how long requested workers take."""

    def __init__(self) -> None:
        self._demand: Callable[[float, float], int] | None = None
        self._client: Client | None = None
        self._reported = 0
        self._next = 0.0  # when to look again
        self._requested: float | None = None  # when more workers were requested than before
        self._connected = time.monotonic()
        self._took: list[float] = []  # requested workers, until they could train
        self._first: float | None = None  # from the connection until the first worker could train

    @property
    def start_seconds(self) -> float:
        """Seconds until a requested worker can train: the minimum so far; before the first request, the time until the
        first worker could train."""
        return min(self._took) if self._took else self._first or 0.0

    def connect(self, client: Client) -> None:
        """Connect, and request at least one worker: a cluster without workers then starts one."""
        self._client = client
        self._connected = time.monotonic()
        try:
            client.register_plugin(AdaptiveTarget())
        except ImportError:
            logger.debug("The scheduler cannot import hpstage; Dask answers adaptive scaling.", exc_info=True)
            self._client = None
            return
        self._reported = 0
        self._report(max(1, self._reported))

    def follow(self, demand: Callable[[float, float], int]) -> None:
        self._demand = demand

    def joined(self) -> None:
        """Record that a worker can be given chains from now on."""
        now = time.monotonic()
        if self._first is None:
            self._first = now - self._connected
        elif self._requested is not None:
            if now - self._requested < _LONGEST:
                self._took.append(now - self._requested)
            self._requested = None

    def look(self, now: float) -> None:
        """Report the demand at ``now``, a time on the executor's clock, to the scheduler.

        The demand is reported at most once a second, and less often if computing it takes long; not to a cluster in
        this process that does not adapt. An unchanged demand is reported too: an earlier report may have been lost.
        """
        if self._demand is None or self._client is None or time.monotonic() < self._next:
            return
        if is_fixed(self._client.cluster):
            self._next = time.monotonic() + _INTERVAL
            return
        began = time.monotonic()
        self._report(self._demand(now, self.start_seconds))
        took = time.monotonic() - began
        self._next = began + max(_INTERVAL, took / _SHARE)

    def _report(self, workers: int) -> None:
        assert self._client is not None
        if workers > self._reported:
            self._requested = time.monotonic()
        self._reported = workers
        scheduler, message = self._client.scheduler, {"client": self._client.id, "workers": workers}
        self._client.loop.add_callback(_send, scheduler, message)


async def _send(scheduler: Any, message: dict[str, Any]) -> None:
    try:
        await scheduler.log_event(topic=_TOPIC, msg=message)
    except OSError:
        logger.debug("The scheduler did not receive the number of workers that the search can use.", exc_info=True)
