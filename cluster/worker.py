"""The worker's side: a plugin that creates a run's training process on the worker, and the tasks that make it train.

All of this runs on the worker's event loop without blocking it; training takes place in the other process.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
from dataclasses import dataclass
from typing import Any

from distributed import Status, Worker, WorkerPlugin, get_worker

from hpstage.cluster.messages import (
    Load,
    encode,
    name_of,
)
from hpstage.cluster.site import Site
from hpstage.errors import ClusterError

logger = logging.getLogger("hpstage")

_LOGGERS = ("distributed.worker", "distributed.worker.state_machine")


class TrainingPlugin(WorkerPlugin):  # type: ignore[misc]
    """Distributes a run's trainable to all workers, including those that join later.

    Args:
        run: id of the run.
        trainable: the user's trainable, cloudpickled.
        driver: host and process id of the driver. Signals to its process group (Ctrl-C on its terminal, ``timeout``)
            must reach only the driver, not the workers that it has started.
        script: the driver's script, for training processes of the workers that it has started.
        silence: seconds after which a training process is ended that neither answers nor computes.
    """

    def __init__(
        self, run: str, trainable: bytes, *, driver: tuple[str, int], script: dict[str, str], silence: float
    ) -> None:
        self._driver = driver
        self._script = script
        self._filters: list[tuple[str, _News]] = []
        self.name = name_of(run)
        self._trainable = trainable
        self._silence = silence
        self.site: Site | None = None

    async def setup(self, worker: Worker) -> None:
        """Make a process unpack the trainable, then report to the driver that this worker is ready, or why it is not.

        A failure is reported, not raised: a worker that joins while its plugin raises would not start.
        """
        host, started_by = self._driver
        script: dict[str, str] = {}
        if host == socket.gethostname() and started_by in (os.getpid(), os.getppid()):
            script = self._script
            if started_by == os.getppid() and os.getpgid(0) == os.getpgid(started_by):
                os.setpgid(0, 0)
            self._filters = [(name, _News(worker)) for name in _LOGGERS]
            for name, news in self._filters:
                logging.getLogger(name).addFilter(news)
        self.site = Site(self.name, worker, Load(self._trainable, script), self._silence)
        await self.site.open()

    async def teardown(self, worker: Worker) -> None:
        if self.site is not None:
            await self.site.close()
        for name, news in self._filters:
            logging.getLogger(name).removeFilter(news)

    def transition(self, key: str, start: str, finish: str, **_: object) -> None:
        # The future was released: the driver has closed, or is dead. Dask would let the task continue.
        if start == "executing" and finish in ("cancelled", "released") and self.site is not None:
            self.site.abandon(key)
        elif finish == "executing" and self.site is not None:
            self.site.make_way()  # whoever's task it is


@dataclass(frozen=True, slots=True)
class _News:
    """Log filter: drops messages on chains and heartbeats cut off because the driver closes the worker."""

    worker: Worker

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "during heartbeat" in message:
            return bool(self.worker.status == Status.running)
        return not message.endswith("ended with CancelledError")


async def run_chain(run: str, key: str, chain: bytes, checkpoints: bytes, lane: str, incarnation: str) -> list[bytes]:
    """Dask task: train a chain in this incarnation of a worker and return all its reports, encoded."""
    return await _site(run).train(key, chain, checkpoints, lane, incarnation)


async def follow_chain(run: str, key: str, chain: bytes, checkpoints: bytes, rank: int, incarnation: str) -> str:
    """Dask task: train a chain in another worker's gang; return why it could not be joined, or an empty string."""
    return await _site(run).follow(key, chain, checkpoints, rank, incarnation)


async def answer(run: str, key: str, request: bytes) -> dict[str, Any] | None:
    """Dask task: answer a :class:`TryOut`, a :class:`Measure` or a :class:`LookAt`, encoded."""
    return await _site(run).answer(key, request)


def _site(run: str) -> Site:
    plugin = get_worker().plugins.get(name_of(run))
    if plugin is None or plugin.site is None:
        raise ClusterError(f"run {run} is over, or its trainable never reached {platform.node()}")
    site: Site = plugin.site
    return site


def described(run: str, dask_worker: Worker) -> bytes | None:
    """Return this worker's description, encoded; ``None`` if the plugin is not installed yet."""
    plugin = dask_worker.plugins.get(name_of(run))
    if plugin is None or plugin.site is None or plugin.site.description is None:
        return None
    return encode(plugin.site.description)
