"""A Dask worker within the process of a local cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed import Worker

from hpstage.cluster.fork_server import ForkServer

_HEARTBEAT = 5.0
"""Seconds between two heartbeats. Dask's default is two per second, and each takes milliseconds from training. A worker
in the scheduler's process cannot be lost by itself, and so needs few heartbeats."""


class LocalWorker(Worker):  # type: ignore[misc]
    """A worker of a local cluster. It only passes messages to its training process, and so needs no process of its own.

    Args:
        variables: additional environment variables of its training processes, which select their device.
        fork_server: forks its training processes; if ``None``, they are spawned.
    """

    def __init__(
        self, *arguments: Any, variables: Mapping[str, str], fork_server: ForkServer | None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.variables = variables
        self.fork_server = fork_server

    def start_http_server(self, *_: Any, **__: Any) -> None:
        """Serve no pages. The scheduler's pages suffice, and Dask would serve a worker's pages on all interfaces."""

    async def heartbeat(self) -> None:
        await super().heartbeat()  # sets the interval that the scheduler requests
        self.periodic_callbacks["heartbeat"].callback_time = 1000 * _HEARTBEAT
