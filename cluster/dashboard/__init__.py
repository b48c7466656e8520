"""The page ``/hpstage`` on the Dask dashboard, its plots as individual pages (the growing stage tree, the workers'
current training, savings, metrics, rungs), and the same figures for Prometheus on Dask's ``/metrics``.

The scheduler does not open any store. Drivers send it the records of their journal (``follower.py``), and it folds them
like every other reader (``board.py``). It thus shows the same plan for every sender, and a restarted scheduler is sent
all records again. Nothing is sent to a scheduler without page and metrics.

``hpstage scheduler`` and local clusters install both. Elsewhere::

    dask scheduler --preload hpstage.cluster.dashboard
    hpstage.cluster.dashboard.install(client)             # on a running cluster

The page needs bokeh and a dashboard; the metrics need prometheus-client. Each is left out if its package is missing.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed import Client, Scheduler

__all__ = ["dask_setup", "install", "page_of"]


def install(client: Client) -> Any:
    """Add page and metrics to the client's scheduler, if they are missing; return whether it has the page now.

    hpstage must be installed where the scheduler runs. For an asynchronous client, await the result.
    """
    return client.run_on_scheduler(install_on)


def page_of(client: Client) -> str | None:
    """Return the URL of the page, according to the client's configuration; ``None`` if its scheduler has no page."""
    from hpstage.cluster.dashboard.follower import INSTALLED, PAGE

    link: str | None = client.dashboard_link
    if not link or client.get_metadata([INSTALLED], None) != "page":
        return None
    return f"{link.rpartition('/')[0]}/{PAGE}"


def dask_setup(scheduler: Scheduler) -> None:
    """Install page and metrics. Dask calls this when it preloads the module."""
    install_on(scheduler)


def install_on(dask_scheduler: Scheduler, *, on_demand: bool = False) -> bool:
    """Same as :func:`install`, called in the scheduler's process, on its event loop.

    ``on_demand``: the scheduler has no dashboard yet; build it at the first request.
    """
    from hpstage.cluster.dashboard.board import Board
    from hpstage.cluster.dashboard.follower import HANDLER, INSTALLED

    scheduler = dask_scheduler  # the name by which Dask passes it
    present: Board | None = getattr(scheduler.handlers.get(HANDLER), "__self__", None)
    if present is not None:
        return present.has_page
    board = Board()
    if on_demand and importlib.util.find_spec("bokeh") is not None:
        from hpstage.cluster.dashboard.on_demand import serve_on_demand

        serve_on_demand(scheduler, board)
        board.has_page = True
    elif importlib.util.find_spec("bokeh") is not None:
        from hpstage.cluster.dashboard.page import serve

        board.has_page = serve(scheduler, board)
    measured = importlib.util.find_spec("prometheus_client") is not None
    if measured:
        from hpstage.cluster.dashboard.metrics import export

        export(scheduler, board)
    if board.has_page or measured:
        scheduler.handlers[HANDLER] = board.take_in
        scheduler.set_metadata(keys=[INSTALLED], value="page" if board.has_page else "metrics")
    return board.has_page
