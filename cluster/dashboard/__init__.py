"""A page ``/hpstage`` on the Dask dashboard, and its plots one by one: the stage tree while it grows, what each worker
trains, savings, metrics, rungs.

The scheduler opens nobody's store. Drivers send it the records of their journal (``follower.py``), and it folds them
as everyone does (``board.py``); so it shows the same plan, whoever sends, and a scheduler that was started anew is sent
them again. Nothing is sent to a scheduler without the page.

The page is installed by ``hpstage scheduler`` and for local clusters. Elsewhere::

    dask scheduler --preload hpstage.cluster.dashboard
    hpstage.cluster.dashboard.install(client)             # on a cluster that runs

A scheduler that serves no dashboard, or has no bokeh, is left as it is.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client, Scheduler

__all__ = ["dask_setup", "install"]


def install(client: Client) -> Any:
    """Add the page to the dashboard of the client's scheduler, if it is not there; returns whether it is there now.

    hpstage must be installed where the scheduler runs. For an asynchronous client, await what is returned.
    """
    return client.run_on_scheduler(_on_scheduler)


def _on_scheduler(dask_scheduler: Scheduler) -> bool:
    return install_on(dask_scheduler)


def dask_setup(scheduler: Scheduler) -> None:
    """Dask calls this of a module that it preloads."""
    install_on(scheduler)


def install_on(scheduler: Scheduler) -> bool:
    """As :func:`install`, in the scheduler's process, on its loop."""
    if importlib.util.find_spec("bokeh") is None:
        return False
    from hpstage.cluster.dashboard.serving import serve

    return serve(scheduler)
