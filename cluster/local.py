"""local_cluster: starts a Dask cluster on this machine, with one worker per GPU or core."""

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
    """Start workers on this machine: one per CUDA GPU, else one for another accelerator, else one per core. Several
    searches can use them::

        with hpstage.local_cluster() as workers:
            first = hpstage.optimize(..., executor=workers)
            second = hpstage.optimize(..., executor=workers)  # begins to train at once

    Each search trains in processes of its own, one per worker. The workers and the scheduler are objects in this
    process, which only pass messages. They have no nannies, so that ``Client.restart()`` would end them: start another
    cluster instead.

    Args:
        n_workers: number of workers; GPUs are assigned to them round-robin.
        gpus: number of GPUs to use (0: none; ``None``: all).
        workers_per_gpu: number of workers that share a GPU; replaces ``n_workers``.
        gpus_per_worker: number of GPUs that each worker sees, for a trainable with ``devices_per_stage``.
        preload: packages to import once for all training processes, such as ``["hpstage.torch"]`` (or numpy, optuna,
            safetensors, scipy, torch, torchvision). Those that this process has imported are included anyway. Use this
            if the cluster is started before the imports: both processes then import at the same time.
        fork_server: a running fork server to use, instead of ``preload``; the cluster closes it.

    Raises:
        UsageError: training processes, which import the calling script, would also run this call; or there is no GPU
            for ``workers_per_gpu``; or ``preload`` names a package that is not installed or cannot be preloaded.
        ClusterError: there are fewer than ``gpus`` GPUs, or the workers do not start.
    """
    require_main_guard()
    if fork_server is not None and preload:
        raise UsageError("preload and fork_server exclude each other: a running server preloads no more; leave one out")
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
