"""A Dask worker in the process of the search that it works for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed import Worker

from hpstage.cluster.fork_server import ForkServer


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
