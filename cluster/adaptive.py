"""Adaptive scaling: what asks Dask's scheduler how many workers to have is told what searches can use.

``cluster.adapt()`` asks over its connection; the autoscaler of Dask's Kubernetes operator asks ``GET
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

logger = logging.getLogger("hpstage")

_TOPIC = "hpstage-demand"
_INTERVAL = 1.0
"""Seconds between two looks at the demand, as between two of Dask's at the scheduler's answer."""
_SHARE = 0.02
"""Share of the driver's time that looks take at most: with thousands of trials, each plays them all to their end."""
_LONGEST = 600.0
"""Seconds beyond which a worker that joins is not taken for one that was asked for."""


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
    """Tells the scheduler what a search can use, and learns how long a worker takes from when it is asked for."""

    def __init__(self) -> None:
        self._demand: Callable[[float, float], int] | None = None
        self._client: Client | None = None
        self._told = 0
        self._next = 0.0  # when to look again
        self._asked: float | None = None  # when more workers were asked for than before
        self._connected = time.monotonic()
        self._took: list[float] = []  # those asked for, until they could train
        self._first: float | None = None  # from the connection until the first worker could train

    @property
    def start_seconds(self) -> float:
        """The least that a worker took so far; before one was asked for, what setting up those present took."""
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
        self._told = 0
        self._tell(max(1, self._told))

    def follow(self, demand: Callable[[float, float], int]) -> None:
        self._demand = demand

    def joined(self) -> None:
        """Note that a worker can be given chains from now on."""
        now = time.monotonic()
        if self._first is None:
            self._first = now - self._connected
        elif self._asked is not None:
            if now - self._asked < _LONGEST:
                self._took.append(now - self._asked)
            self._asked = None

    def look(self, now: float) -> None:
        """Tell the scheduler the demand at ``now`` on the executor's clock; at most once in a second, and less often if
        it takes long to find out.

        Also if it is as before: what was told may have been lost.
        """
        if self._demand is None or self._client is None or time.monotonic() < self._next:
            return
        began = time.monotonic()
        self._tell(self._demand(now, self.start_seconds))
        took = time.monotonic() - began
        self._next = began + max(_INTERVAL, took / _SHARE)

    def _tell(self, workers: int) -> None:
        assert self._client is not None
        if workers > self._told:
            self._asked = time.monotonic()
        self._told = workers
        scheduler, message = self._client.scheduler, {"client": self._client.id, "workers": workers}
        self._client.loop.add_callback(_send, scheduler, message)


async def _send(scheduler: Any, message: dict[str, Any]) -> None:
    try:
        await scheduler.log_event(topic=_TOPIC, msg=message)
    except OSError:
        logger.debug("the scheduler was not told how many workers could be used", exc_info=True)
