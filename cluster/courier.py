"""Sending orders to workers while their chains run."""

from __future__ import annotations

import logging
import threading

from distributed import Client

from hpstage.cluster.messages import Order, encode
from hpstage.plan.facts import WorkerId

logger = logging.getLogger("hpstage")


class Courier:
    """Sends each worker its orders in sequence, without blocking; delivery is not guaranteed.

    Orders are sent through the scheduler, since some drivers cannot reach the workers. They do not wait for Dask tasks,
    and arrive after about 1.5 ms. Thread-safe.

    Args:
        client: a connected client.
        channel: name of the workers' handler.
    """

    def __init__(self, client: Client, channel: str) -> None:
        self._loop = client.loop
        self._scheduler = client.scheduler  # read now: a closed client has none
        self._channel = channel
        self._lock = threading.Lock()
        self._waiting: dict[WorkerId, list[Order]] = {}  # while an earlier delivery is in progress

    def send(self, worker: WorkerId, order: Order) -> None:
        with self._lock:
            waiting = self._waiting.get(worker)
            if waiting is not None:
                waiting.append(order)
                return
            self._waiting[worker] = [order]
        self._loop.add_callback(self._deliver, worker)

    async def _deliver(self, worker: WorkerId) -> None:
        while True:
            with self._lock:
                orders = self._waiting[worker]
                if not orders:
                    del self._waiting[worker]
                    return
                self._waiting[worker] = []
            try:
                await self._scheduler.broadcast(
                    msg={"op": self._channel, "orders": encode(orders)}, workers=[worker], on_error="ignore"
                )
            except OSError:
                # Without a scheduler, all workers are lost, which the executor reports.
                logger.debug("Orders for worker %s were lost.", worker, exc_info=True)
