"""The documents served on the dashboard (the page, and each of its panels), and functions that add them to Dask's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from bokeh.document import Document
from bokeh.layouts import column, row
from bokeh.models import CustomJS
from bokeh.server.tornado import BokehTornado
from distributed.dashboard import scheduler as dask_dashboard
from distributed.dashboard.components import add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from hpstage.cluster.dashboard.board import Board
from hpstage.cluster.dashboard.figures import Metrics, Rungs, Savings, Workers
from hpstage.cluster.dashboard.follower import PAGE
from hpstage.cluster.dashboard.panels import Panel, Screen
from hpstage.cluster.dashboard.words import Chooser, Failures, StageTree, Summary

PANELS: Mapping[str, type[Panel]] = {
    "tree": StageTree,
    "workers": Workers,
    "savings": Savings,
    "metrics": Metrics,
    "rungs": Rungs,
    "summary": Summary,
    "failures": Failures,
}

_INTERVAL = 500
"""Milliseconds between two drawings."""
_SIDE_BY_SIDE = {"display": "grid", "grid-template-columns": "repeat(auto-fit, minmax(min(340px, 100%), 1fr))"}
"""Figures are side by side, or below each other if there is no room."""
_TEMPLATE = """{% extends "simple.html" %}{% block extra_resources %}<style>
html, body { color-scheme: light dark; height: auto; overflow-x: hidden }
@media (prefers-color-scheme: dark) { html { background: #121314; color: #dddddd }
  .navbar ul { background-color: #26282b } .navbar li a { color: #dddddd } }
</style>{% endblock %}"""


_LOST = """
if (!document.getElementById("hpstage-lost")) {
    const note = document.createElement("p")
    note.id = "hpstage-lost"
    note.textContent = "The connection to the scheduler is lost: the search or the scheduler has ended. " +
        "The page shows the last figures received."
    note.style = "position: fixed; bottom: 0; left: 0; right: 0; z-index: 9; margin: 0; padding: 0.6em 1em; " +
        "font: 14px sans-serif; color: #fff; background: #8a3b12"
    document.body.append(note)
}
"""
"""Run in the browser at each failed attempt to connect. Without it, the page would look as if it were up to date."""


def page_doc(board: Board, scheduler: Any, extra: dict[str, Any], doc: Document) -> None:
    """Build the page with all panels of one study, which is chosen on the page or in the URL: ``?study=digits``."""
    chooser = Chooser(board, scheduler, doc)
    chooser.name = _named(doc)

    def panel(kind: type[Panel], height: int = 0) -> Panel:
        return kind(board, scheduler, doc, sizing_mode="stretch_width", height=height)

    summary, failures, tree, workers = panel(Summary), panel(Failures), panel(StageTree), panel(Workers, 120)
    side_by_side = [panel(kind, 300) for kind in (Metrics, Savings, Rungs)]
    screen = Screen(board, [chooser, summary, failures, tree, workers, *side_by_side], chooser.chosen)

    def choose(attribute: str, old: object, new: object) -> None:
        chooser.name = None
        screen.draw()

    chooser.root.on_change("value", choose)
    top = row(chooser.root, summary.root, sizing_mode="stretch_width", styles={"display": "flex", "flex-wrap": "wrap"})
    figures = row(*(one.root for one in side_by_side), sizing_mode="stretch_width", styles=_SIDE_BY_SIDE)
    _serve(doc, screen, column(top, failures.root, tree.root, workers.root, figures, sizing_mode="stretch_width"))
    doc.title = "Dask: hpstage"
    doc.template = env.from_string(_TEMPLATE)
    doc.template_variables.update(extra)


def individual_doc(board: Board, kind: type[Panel], scheduler: Any, extra: dict[str, Any], doc: Document) -> None:
    """Build a document with one panel, of the study that the URL names, else of the latest."""
    name, panel = _named(doc), kind(board, scheduler, doc)
    _serve(doc, Screen(board, [panel], lambda: name), panel.root)
    doc.title = f"hpstage: {kind.__name__}"


def _serve(doc: Document, screen: Screen, root: Any) -> None:
    screen.follow_colours(doc)
    screen.draw()
    add_periodic_callback(doc, screen, _INTERVAL)
    doc.add_root(root)
    doc.theme = BOKEH_THEME
    doc.js_on_event("connection_lost", CustomJS(code=_LOST))


def _named(doc: Document) -> str | None:
    """Return the study that the page's URL names; ``None`` if it names none."""
    request: Any = getattr(doc.session_context, "request", None)
    values = [] if request is None else request.arguments.get("study", [])
    return values[0].decode("utf-8", "replace") if values else None


_ENTRY = f"&#{ord(PAGE[0])};{PAGE[1:]}"
"""The page's entry in the navigation bar. Its first letter is encoded, since Dask would capitalize it."""


def serve_all(scheduler: Any, board: Board) -> None:
    """Serve Dask's dashboard on a scheduler without one, and the page of ``board``."""
    dask_dashboard.connect(scheduler.http_application, scheduler.http_server, scheduler, prefix="")
    serve(scheduler, board)


def serve(scheduler: Any, board: Board) -> bool:
    """Serve the page of ``board`` if the scheduler has a dashboard; return whether it has one."""
    dashboards = [app for app in scheduler.http_application.applications if isinstance(app, BokehTornado)]
    if not dashboards:
        return False
    pages: dict[str, Any] = {f"/{PAGE}": partial(page_doc, board)}
    pages |= {f"/individual-{PAGE}-{name}": partial(individual_doc, board, plot) for name, plot in PANELS.items()}
    # The pages of an application are fixed at its creation, and Dask lists only the plots of its first application.
    # Therefore a new application with all pages is inserted before the existing one, which still serves its viewers.
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
        # Other schedulers of this process have boards of their own.
        dask_dashboard.applications.clear()
        dask_dashboard.applications.update(theirs)
    applications = scheduler.http_application.applications
    applications.insert(0, applications.pop())
    return True
