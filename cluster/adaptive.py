"""Adaptive scaling: Dask's scheduler answers how many workers to have by what searches can use.

``cluster.adapt()`` requests it over its connection; the autoscaler of Dask's Kubernetes operator sends ``GET
/api/v1/adaptive_target``, or else over a connection. The scheduler itself would answer with the tasks that wait for a
worker, and those of a search never do: each is pinned to a free one. Which workers leave, the scheduler decides: those
without a task first.
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
"""Seconds between two looks at the demand, as between two of Dask's at the scheduler's answer."""
_SHARE = 0.02
"""Share of the driver's time that looks take at most: with thousands of trials, each plays them all to their end."""
_LONGEST = 600.0
"""Seconds beyond which a worker that joins does not count as one that was requested."""


class AdaptiveTarget(SchedulerPlugin):  # type: ignore[misc]
    """On the scheduler: answers with the sum of what searches can use, and at least what other tasks need.

    It stays, but answers only while a search is connected.
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
        # The scheduler counts the workers with tasks, of searches too, but none that is to come for a search.
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
        """The least that a worker took so far; before one was requested, what setting up those present took."""
        return min(self._took) if self._took else self._first or 0.0

    def connect(self, client: Client) -> None:
        """Begin with a worker, so that a cluster that has none starts one."""
        self._client = client
        self._connected = time.monotonic()
        try:
            client.register_plugin(AdaptiveTarget())
        except ImportError:
            logger.debug("the scheduler cannot import hpstage, and answers adaptive scaling itself", exc_info=True)
            self._client = None
            return
        self._reported = 0
        self._report(max(1, self._reported))

    def follow(self, demand: Callable[[float, float], int]) -> None:
        self._demand = demand

    def joined(self) -> None:
        """Note that a worker can be given chains from now on."""
        now = time.monotonic()
        if self._first is None:
            self._first = now - self._connected
        elif self._requested is not None:
            if now - self._requested < _LONGEST:
                self._took.append(now - self._requested)
            self._requested = None

    def look(self, now: float) -> None:
        """Report the demand at ``now`` on the executor's clock to the scheduler: at most once a second, and less often
        if it takes long to compute; never while it is a cluster of this process that does not adapt.

        Also if it is unchanged: an earlier report may have been lost.
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
        logger.debug("the scheduler did not receive how many workers could be used", exc_info=True)
