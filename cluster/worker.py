"""The plugin that creates a run's training process on each worker.

This code runs on the worker's event loop, and does not block it; training takes place in the training process.
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
        driver: host and process id of the driver. Signals to the driver's process group (Ctrl-C on its terminal,
            ``timeout``) must not reach the workers that the driver has started.
        script: the driver's script, for training processes of the workers that the driver has started.
        silence: seconds after which a training process that neither answers nor computes is killed.
    """

    def __init__(
        self, run: str, trainable: bytes, *, driver: tuple[str, int], script: dict[str, str], silence: float
    ) -> None:
        self._driver = driver
        self._script = script
        self._python = PYTHON
        self._arguments = sys.argv[:]  # of the driver, which creates this object; the user's code may parse them
        self._filters: list[tuple[str, _News]] = []
        self.name = name_of(run)
        self._trainable = trainable
        self._silence = silence
        self.site: Site | None = None

    async def setup(self, worker: Worker) -> None:
        """Start a training process, and report to the driver that this worker is ready, or why it is not.

        A failure is reported, not raised: a joining worker would not start if its plugin raised.
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
            self.site.make_way()  # for any Dask task, not only those of this run


@dataclass(frozen=True, slots=True)
class _News:
    """A log filter that drops messages about chains and heartbeats that break when the driver closes the worker."""

    worker: Worker

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "during heartbeat" in message:
            return bool(self.worker.status == Status.running)
        return not message.endswith("ended with CancelledError")
