"""Brings orders to workers while their chains run."""

from __future__ import annotations

import logging
import threading

from distributed import Client

from hpstage.cluster.messages import Order, encode
from hpstage.plan.facts import WorkerId

logger = logging.getLogger("hpstage")


class Courier:
    """Delivers each worker's orders in the order in which they were sent; returns at once and promises nothing more.

    They go through the scheduler, since not every driver reaches the workers, and do not wait for Dask's tasks: they
    arrive after some 1.5 ms. Safe among threads.

    Args:
        client: connected.
        channel: the name of the workers' handler.
    """

    def __init__(self, client: Client, channel: str) -> None:
        self._loop = client.loop
        self._scheduler = client.scheduler  # a closed client has none
        self._channel = channel
        self._lock = threading.Lock()
        self._waiting: dict[WorkerId, list[Order]] = {}  # while an earlier delivery is under way

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
                # Without a scheduler there are no workers either, and the executor tells that.
                logger.debug("orders for %s were lost", worker, exc_info=True)
