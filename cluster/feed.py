"""The feed of a run: messages of its sites to the driver, over a Dask topic, or by a call within a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed import Worker

from hpstage.cluster.local_worker import LocalWorker

Receiver = Callable[[dict[str, Any]], None]

receivers: dict[str, Receiver] = {}
"""Receivers of feeds by the name of the run, for drivers in the process of a local cluster."""


def publish(worker: Worker, run: str, message: dict[str, Any]) -> None:
    """Send a message to the driver of a run."""
    receive = receivers.get(run) if isinstance(worker, LocalWorker) else None
    if receive is None:
        worker.log_event(run, message)
    else:
        receive(message)
