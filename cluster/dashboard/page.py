"""The documents served on the dashboard: the page, and each plot individually."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bokeh.document import Document
from bokeh.layouts import column, row
from bokeh.models.widgets import Select
from distributed.dashboard.components import add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from hpstage.cluster.dashboard.board import Board, Shown
from hpstage.cluster.dashboard.plots import Metrics, Plot, Rungs, Savings, Sizing, StageTree, Summary, Workers

_INTERVAL = 500
"""Milliseconds between two updates."""
_LATEST = ""
"""The choice that follows the latest started study."""
_MOST_CHOICES = 50


class Chooser(Plot):
    """A list of all studies, from which the displayed one is chosen."""

    def make(self) -> None:
        self.source = None
        self.root = Select(title="Study", value=_LATEST, width=260)

    def chosen(self) -> str | None:
        return self.root.value or None

    def version(self, shown: Shown | None) -> object:
        return [(shown.key, shown.study.ended) for shown in self.board.studies()[:_MOST_CHOICES]]

    def draw(self, shown: Shown | None) -> None:
        options: list[str | tuple[Any, str]] = [(_LATEST, "the latest")]
        for study in self.board.studies()[:_MOST_CHOICES]:
            options.append((study.key, study.study.name + ("" if not study.study.ended else " (ended)")))
        self.root.options = options


def page_doc(board: Board, scheduler: Any, extra: dict[str, Any], doc: Document) -> None:
    """Build the page: all plots of one study, which can be chosen."""
    chooser = Chooser(board, scheduler)

    def plot(kind: type[Plot], height: int = 0, sizing_mode: Sizing = "stretch_width") -> Plot:
        return kind(board, scheduler, choose=chooser.chosen, sizing_mode=sizing_mode, height=height)

    summary = plot(Summary)
    tree, workers = plot(StageTree, 480), plot(Workers, 200)
    savings, metrics, rungs = plot(Savings, 300), plot(Metrics, 300), plot(Rungs, 300)
    shown = [chooser, summary, tree, workers, savings, metrics, rungs]
    for one in shown:
        one.update()
        add_periodic_callback(doc, one, _INTERVAL)

    def update_all(attribute: str, old: object, new: object) -> None:
        for one in shown:
            one.update()

    chooser.root.on_change("value", update_all)
    doc.add_root(
        column(
            row(chooser.root, summary.root, sizing_mode="stretch_width"),
            tree.root,
            workers.root,
            row(metrics.root, savings.root, rungs.root, sizing_mode="stretch_width"),
            sizing_mode="stretch_width",
        )
    )
    doc.title = "Dask: hpstage"
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME


def individual(board: Board, kind: type[Plot]) -> Callable[[Any, dict[str, Any], Document], None]:
    """Return a function that builds a document with one plot, of the latest study."""
    return partial(_individual_doc, board, kind)


def _individual_doc(board: Board, kind: type[Plot], scheduler: Any, extra: dict[str, Any], doc: Document) -> None:
    plot = kind(board, scheduler)
    plot.update()
    add_periodic_callback(doc, plot, _INTERVAL)
    doc.add_root(plot.root)
    doc.title = f"hpstage: {kind.__name__}"
    doc.theme = BOKEH_THEME
