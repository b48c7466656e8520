"""Chains that a driver starts by calling a worker of a local cluster, which is an object in the same process.

A Dask task would take about 4 ms of the process's time, for a dozen messages between client, scheduler and worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from distributed import Client

from hpstage.cluster.local_worker import LocalWorker
from hpstage.cluster.private import is_fixed
from hpstage.cluster.site import Site


def site_of(client: Client, run: str, address: str) -> Site | None:
    """Return the site of a run on a worker, or ``None`` if its chains cannot be started by calls, as on a cluster that
    adapts: Dask would stop its workers, since they have no tasks."""
    if not is_fixed(client.cluster):
        return None
    for worker in list(client.cluster.workers.values()):
        # A worker that is still starting has neither plugins nor an address.
        if isinstance(worker, LocalWorker) and run in worker.plugins and worker.address == address:
            site: Site | None = worker.plugins[run].site
            return site
    return None


class DirectChain:
    """A chain that was started by a call. Has the methods of a Dask future that the executor needs.

    As with Dask, the future is never done if its worker leaves; another report informs the driver.
    """

    def __init__(self, site: Site, key: str, *arguments: Any) -> None:
        self._site = site
        self._key = key
        self._future = asyncio.run_coroutine_threadsafe(site.train_directly(key, *arguments), site.loop)

    def add_done_callback(self, call: Callable[[DirectChain], object]) -> None:
        self._future.add_done_callback(lambda future: None if future.cancelled() else call(self))

    def cancelled(self) -> bool:
        return self._future.cancelled()

    def result(self) -> list[bytes]:
        return self._future.result()

    def release(self) -> None:
        if not self._future.done():
            self._site.loop.call_soon_threadsafe(self._site.abandon, self._key)
