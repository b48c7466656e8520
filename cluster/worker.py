"""The plugin that creates a run's training process on each worker.

All of this runs on the worker's event loop without blocking it; training takes place in the other process.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from dataclasses import dataclass

from distributed import Status, Worker, WorkerPlugin

from hpstage.cluster.messages import PYTHON, Load, name_of
from hpstage.cluster.site import Site

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
        self._python = PYTHON
        self._arguments = sys.argv[:]  # of the driver, which makes this object: training may parse them
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
        load = Load(self._trainable, script, self._arguments, self._python)
        self.site = Site(self.name, worker, load, self._silence)
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
