"""Acts: trains chains on the workers of a Dask cluster."""

from hpstage.cluster.executor import DaskExecutor
from hpstage.cluster.launch import local_cluster

__all__ = ["DaskExecutor", "local_cluster"]
