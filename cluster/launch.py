"""Starts a Dask cluster on this machine, configured for training."""

from __future__ import annotations

import importlib.util
import signal
import socket
import warnings
from multiprocessing import resource_tracker
from typing import Any

import dask.config
from distributed import LocalCluster

from hpstage.cluster.dashboard import install_on
from hpstage.cluster.devices import environment_of, first_devices, grouped, how_many, visible_devices
from hpstage.cluster.main_guard import require_main_guard
from hpstage.cluster.private import start_workers
from hpstage.cluster.script import leave_it_to_training_processes
from hpstage.errors import ClusterError


def local_cluster(
    n_workers: int | None = None,
    *,
    gpus: int | None = None,
    workers_per_gpu: int | None = None,
    gpus_per_worker: int = 1,
    lanes: int = 1,
) -> LocalCluster:
    """Start workers: one per GPU, if there are any, else one per core.

    Memory is not limited (states kept in memory would look like a leak), and Dask's task profiler is off: with steps of
    1 ms it takes 2 to 3 % of a core per worker.

    Args:
        n_workers: number of workers; GPUs are assigned to them round-robin.
        gpus: number of GPUs to use (0: none; ``None``: all).
        workers_per_gpu: how many share a GPU, in place of ``n_workers``.
        gpus_per_worker: how many GPUs each worker sees, for a trainable with ``devices_per_stage``.
        lanes: number of threads of each worker. They do not train: each waits for one of the chains that the worker's
            training process trains side by side, which is one unless siblings are trained as one.

    Raises:
        UsageError: training processes, which import the calling script, would also run this call; or there is no GPU
            for ``workers_per_gpu``.
        ClusterError: there are fewer than ``gpus`` GPUs, or the workers do not start.
    """
    require_main_guard()
    leave_it_to_training_processes()
    devices = [] if gpus == 0 else grouped(first_devices(visible_devices(), gpus), gpus_per_worker)
    return _Cluster(how_many(n_workers, workers_per_gpu, devices), devices, hide=gpus == 0, lanes=lanes)


class _Cluster(LocalCluster):  # type: ignore[misc]
    """A LocalCluster whose workers see one device each, or one group of devices."""

    def __init__(self, n_workers: int, devices: list[str], *, hide: bool, lanes: int) -> None:
        self._devices, self._size = devices, n_workers
        self._hide = hide
        dashboard = importlib.util.find_spec("bokeh") is not None
        with warnings.catch_warnings():
            # Another cluster may take the port after the check; Dask then picks another one.
            warnings.filterwarnings("ignore", r"\s*Port \d+ is already in use")
            super().__init__(
                n_workers=0,
                threads_per_worker=lanes,
                memory_limit=0,
                dashboard_address=_dashboard_address(),  # also serves /metrics
                scheduler_kwargs={"dashboard": dashboard, "worker_ttl": _worker_ttl()},
                config=dask.config.merge(
                    dask.config.config, {"distributed": {"worker": {"profile": {"enabled": False}}}}
                ),
            )
        self.sync(self._leave_ctrl_c_to_us)
        self.sync(self._add_page)
        for _ in range(n_workers):
            self.worker_spec.update(self.new_worker_spec())
        try:
            start_workers(self)
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError):
                raise ClusterError(f"the local workers did not start ({error}); their output is above") from None
            raise

    async def _leave_ctrl_c_to_us(self) -> None:
        """Block Ctrl-C for workers, which are children of this thread: a terminal sends it to all its processes."""
        resource_tracker.ensure_running()  # unblocks the signal in the thread that starts it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    async def _add_page(self) -> None:
        install_on(self.scheduler)

    def new_worker_spec(self) -> dict[Any, Any]:
        spec: dict[Any, Any] = super().new_worker_spec()
        return {
            name: {**worker, "options": {**worker["options"], "env": self._shown(name)}}
            for name, worker in spec.items()
        }

    def _shown(self, name: object) -> dict[str, str]:
        return environment_of(int(str(name)), self._devices, hide=self._hide, workers=self._size)


def _worker_ttl() -> str:
    """Return how long a worker may be silent: the user's setting, else less than Dask's five minutes.

    Not much less, since a call into C that holds the GIL for longer ends its worker.
    """
    configured: str = dask.config.get("distributed.scheduler.worker-ttl")
    return "60s" if configured == "5 minutes" else configured


def _dashboard_address() -> str:
    """Return an address with Dask's usual port, where users expect it, or any other port if it is taken."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 8787))
        except OSError:
            return "127.0.0.1:0"
    return "127.0.0.1:8787"
