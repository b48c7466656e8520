"""A Dask worker inside the process of its search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed import Worker

from hpstage.cluster.fork_server import ForkServer

_HEARTBEAT = 5.0
"""Seconds between two heartbeats. By default, the scheduler requests two a second, each of which takes milliseconds
from training. A worker in the scheduler's own process cannot be lost separately."""


class LocalWorker(Worker):  # type: ignore[misc]
    """A worker of a local cluster. It only passes messages to its training process, and so needs no process itself.

    Args:
        variables: environment variables of its training processes, which see one device each.
        fork_server: starts them; without one they are spawned.
    """

    def __init__(
        self, *arguments: Any, variables: Mapping[str, str], fork_server: ForkServer | None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self.variables = variables
        self.fork_server = fork_server

    def start_http_server(self, *_: Any, **__: Any) -> None:
        """Serve no pages: the scheduler's pages show all, and Dask would serve a worker's pages on all interfaces."""

    async def heartbeat(self) -> None:
        await super().heartbeat()  # which sets the scheduler's interval
        self.periodic_callbacks["heartbeat"].callback_time = 1000 * _HEARTBEAT
