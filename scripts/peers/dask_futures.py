"""Plain Dask futures on a local cluster; there is no ASHA."""

from __future__ import annotations

import dask
import distributed
import shared_task as task
from distributed import Client, LocalCluster, as_completed


def main() -> None:
    options = task.parse()
    with (
        LocalCluster(n_workers=options.workers, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        futures = [client.submit(task.train, point, options, bool, pure=False) for point in task.points(options)]
        found = [future.result() for future in as_completed(futures)]
    task.finish(found, {"dask": dask.__version__, "distributed": distributed.__version__})


if __name__ == "__main__":
    main()
