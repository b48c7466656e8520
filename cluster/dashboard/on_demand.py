"""Build a scheduler's dashboard at the first request, since importing bokeh takes most of a second."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from typing import Any

from tornado import web
from tornado.routing import PathMatches, Rule

from hpstage.cluster.dashboard.board import Board

_PLOTS = r"/individual-plots\.json"
"""URL of the list of plots. As long as there is no dashboard, Dask itself would answer with an empty list."""


def serve_on_demand(scheduler: Any, board: Board) -> None:
    """Serve a dashboard with the page of ``board`` on a scheduler that was started without a dashboard."""
    application = scheduler.http_application
    building = asyncio.Lock()

    async def build() -> bool:
        """Build the dashboard; return whether it was still missing."""
        async with building:
            if plots not in application.default_router.rules:
                return False
            page: Any = await asyncio.to_thread(importlib.import_module, "hpstage.cluster.dashboard.page")
            page.serve_all(scheduler, board)
            application.default_router.rules.remove(plots)
            return True

    handler = {"build": build}
    plots = Rule(PathMatches(_PLOTS), _Unbuilt, handler)
    application.default_router.rules.insert(0, plots)
    application.add_application(web.Application([(".*", _Unbuilt, handler)]))


class _Unbuilt(web.RequestHandler):
    """Handles requests that have no other handler: builds the dashboard, and redirects to the same URL."""

    def initialize(self, build: Callable[[], Awaitable[bool]]) -> None:
        self._build = build

    async def get(self) -> None:
        if not await self._build():
            raise web.HTTPError(404)
        self.redirect(str(self.request.uri))
