"""Adds the page to a scheduler's dashboard, which has no hook for additional pages."""

from __future__ import annotations

from functools import partial
from typing import Any

from bokeh.server.tornado import BokehTornado
from distributed.dashboard import scheduler as dask_dashboard

from hpstage.cluster.dashboard.board import Board
from hpstage.cluster.dashboard.follower import PAGE
from hpstage.cluster.dashboard.page import PANELS, individual_doc, page_doc

_ENTRY = f"&#{ord(PAGE[0])};{PAGE[1:]}"
"""The page's entry in the navigation bar, encoded since Dask would capitalize its name."""


def serve_all(scheduler: Any, board: Board) -> None:
    """Serve Dask's dashboard on a scheduler without one, and the page of ``board``."""
    dask_dashboard.connect(scheduler.http_application, scheduler.http_server, scheduler, prefix="")
    serve(scheduler, board)


def serve(scheduler: Any, board: Board) -> bool:
    """Serve the page of ``board``, if the scheduler has a dashboard; return whether it has."""
    dashboards = [app for app in scheduler.http_application.applications if isinstance(app, BokehTornado)]
    if not dashboards:
        return False
    pages: dict[str, Any] = {f"/{PAGE}": partial(page_doc, board)}
    pages |= {f"/individual-{PAGE}-{name}": partial(individual_doc, board, plot) for name, plot in PANELS.items()}
    # The pages of an application are fixed on creation, and Dask lists the plots of its first application only. So
    # another one with all pages is inserted before the existing one (which still serves its current viewers).
    theirs = dict(dask_dashboard.applications)
    variables = dask_dashboard.template_variables(scheduler)
    variables["pages"].insert(variables["pages"].index("info") if "info" in variables["pages"] else 0, _ENTRY)
    variables["plots"] += [
        {"url": f"individual-{PAGE}-{name}", "name": f"{PAGE} {name.replace('-', ' ')}"} for name in PANELS
    ]
    dask_dashboard.applications.update(pages)
    try:
        dask_dashboard.connect(
            scheduler.http_application, scheduler.http_server, scheduler, prefix=dashboards[0].prefix
        )
    finally:
        # Other schedulers of this process have separate boards.
        dask_dashboard.applications.clear()
        dask_dashboard.applications.update(theirs)
    applications = scheduler.http_application.applications
    applications.insert(0, applications.pop())
    return True
