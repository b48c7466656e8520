"""TrainingCluster: Dask's LocalCluster, with devices and settings for training. Users call ``local.py``."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import dask.config
from distributed import LocalCluster
from distributed.utils import format_dashboard_link

from hpstage.cluster.dashboard import install_on
from hpstage.cluster.devices import environment_of
from hpstage.cluster.fork_server import ForkServer
from hpstage.cluster.local_worker import LocalWorker
from hpstage.cluster.private import draw_apart, start_workers
from hpstage.cluster.settings import dask_folder
from hpstage.errors import ClusterError

_SLOTS = 256
"""Maximum number of Dask tasks of a worker at the same time. A task only waits for its chain, on an event loop."""

_QUIET = {
    # Scheduler and workers run in this process, which shares the cores with training.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "5s",
    "distributed.admin.tick.cycle": "5s",
    # Each task is pinned to a worker, and its result is a few bytes.
    "distributed.scheduler.work-stealing": False,
    "distributed.scheduler.active-memory-manager.start": False,
    "distributed.admin.system-monitor.interval": "5s",
    # Any account of this host can open the page: routes that take orders or forward requests are not served.
    "distributed.scheduler.http.routes": [
        f"distributed.http.{name}"
        for name in ("scheduler.prometheus", "scheduler.info", "scheduler.json", "health", "statics")
    ],
}
_CUT_OFF = ("Batched Comm Closed", "Failed to communicate with scheduler during heartbeat")


class TrainingCluster(LocalCluster):  # type: ignore[misc]
    """A LocalCluster whose workers' training processes see one device each, or one group of devices.

    Scheduler and workers do not listen on sockets, since Dask runs the code of anybody who connects. Only clients in
    this process can reach them.
    """

    def __init__(self, n_workers: int, devices: list[str], *, hide: bool, fork_server: ForkServer | None) -> None:
        self._devices, self._size = devices, n_workers
        self._hide = hide
        self._fork_server = fork_server
        self._folder = dask_folder()
        draw_apart()
        for name in ("distributed.batched", "distributed.worker"):
            logging.getLogger(name).addFilter(_is_news)
        path = list(sys.path)
        try:
            with warnings.catch_warnings(), dask.config.set(_QUIET | {"temporary-directory": self._folder}):
                # Dask's usual port, where users expect the page. If another cluster has it, Dask picks another one.
                warnings.filterwarnings("ignore", r"\s*Port \d+ is already in use")
                # Dask uses the IP address only for the names of addresses: there are no sockets.
                warnings.filterwarnings("ignore", "Couldn't detect a suitable IP address")
                super().__init__(
                    n_workers=0,
                    threads_per_worker=_SLOTS,
                    worker_class=LocalWorker,
                    processes=False,
                    protocol="inproc://",
                    memory_limit=0,
                    dashboard_address="127.0.0.1:8787",  # also serves /metrics
                    # The page is built at the first request. Workers in this process cannot be silent on their own.
                    scheduler_kwargs={"dashboard": False, "worker_ttl": None},
                )
                self.sync(self._add_page)
                for _ in range(n_workers):
                    self.worker_spec.update(self.new_worker_spec())
                start_workers(self)
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError):
                raise ClusterError(f"the local workers did not start ({error}); see their output above") from None
            raise
        finally:
            sys.path[:] = path  # without the folders that Dask has added, which are for training processes

    @property
    def dashboard_link(self) -> str:
        """The URL of the dashboard, which listens on a socket although the scheduler does not."""
        return str(format_dashboard_link("localhost", self.scheduler_info["services"]["dashboard"]))

    def close(self, timeout: float | None = None) -> Any:
        closed = super().close(timeout)
        if self._fork_server is not None:
            self._fork_server.close()
        return closed

    async def _add_page(self) -> None:
        install_on(self.scheduler, on_demand=True)

    def new_worker_spec(self) -> dict[Any, Any]:
        spec: dict[Any, Any] = super().new_worker_spec()
        return {
            name: {
                **worker,
                "options": {
                    **worker["options"],
                    "local_directory": self._folder,
                    "variables": environment_of(int(str(name)), self._devices, hide=self._hide, workers=self._size),
                    "fork_server": self._fork_server,
                },
            }
            for name, worker in spec.items()
        }


def _is_news(record: logging.LogRecord) -> bool:
    """Return false for messages about connections that break when the parts of a local cluster close in turn."""
    return not record.getMessage().startswith(_CUT_OFF)
