"""Starts workers on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpstage.cluster.fork_server import ForkServer
from hpstage.cluster.fork_server import fork_server as start_fork_server
from hpstage.cluster.main_guard import require_main_guard
from hpstage.errors import UsageError
from hpstage.errors.arguments import WORKERS, checked, instance, optional, several, text, whole

if TYPE_CHECKING:
    from distributed import LocalCluster


@checked(
    n_workers=optional(WORKERS),
    gpus=optional(whole(0)),
    workers_per_gpu=optional(WORKERS),
    gpus_per_worker=whole(),
    preload=several(text(""), "a list of packages, such as ['hpstage.torch']", single=False),
    fork_server=optional(instance(ForkServer, "one that fork_server() has started")),
)
def local_cluster(
    n_workers: int | None = None,
    *,
    gpus: int | None = None,
    workers_per_gpu: int | None = None,
    gpus_per_worker: int = 1,
    preload: Sequence[str] = (),
    fork_server: ForkServer | None = None,
) -> LocalCluster:
    """Start workers: one per GPU, if there are any, else one per core (a single one for a GPU that is not CUDA's). They
    can be kept for several searches::

        with hpstage.local_cluster() as workers:
            first = hpstage.optimize(..., executor=workers)
            second = hpstage.optimize(..., executor=workers)  # begins to train at once

    Each search trains in processes of its own, one per worker. The workers themselves, like the scheduler, are objects
    in this process: they only pass messages. ``Client.restart()`` ends them, since they have no nannies: start another
    cluster instead.

    Args:
        n_workers: number of workers; GPUs are assigned to them round-robin.
        gpus: number of GPUs to use (0: none; ``None``: all).
        workers_per_gpu: how many share a GPU, in place of ``n_workers``.
        gpus_per_worker: how many GPUs each worker sees, for a trainable with ``devices_per_stage``.
        preload: packages to import ahead, once for all training processes, such as ``["hpstage.torch"]`` (or numpy,
            optuna, safetensors, scipy, torch, torchvision). Those that this process has imported are imported ahead
            anyway: this is for a cluster that is started before that, so that both import at the same time.
        fork_server: one that was started before, in place of ``preload``; the cluster closes it.

    Raises:
        UsageError: training processes, which import the calling script, would also run this call; or there is no GPU
            for ``workers_per_gpu``; or ``preload`` names another package, or one that is not installed.
        ClusterError: there are fewer than ``gpus`` GPUs, or the workers do not start.
    """
    require_main_guard()
    if fork_server is not None and preload:
        raise UsageError("preload= has no effect on a fork_server= that is already running; leave one of them out")
    server = fork_server or start_fork_server(preload)  # imports torch while this process imports Dask
    try:
        from hpstage.cluster.devices import assigned
        from hpstage.cluster.launch import TrainingCluster

        devices, count = assigned(n_workers, gpus, workers_per_gpu, gpus_per_worker)
        return TrainingCluster(count, devices, hide=gpus == 0, fork_server=server)
    except BaseException:
        if server is not None:
            server.close()
        raise
