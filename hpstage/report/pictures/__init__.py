"""The pictures of a report, drawn with matplotlib: from a book, or from what :mod:`hpstage.report.views` made of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from hpstage.report.book import Book
from hpstage.report.causes import causes_of
from hpstage.report.pictures import merge_rate, metrics, savings, stage_tree, style, timeline
from hpstage.report.pictures.style import save
from hpstage.report.views.merge_rate import merge_rate_view
from hpstage.report.views.metrics import metrics_view
from hpstage.report.views.stage_tree import stage_tree_view
from hpstage.report.views.timeline import timeline_view

__all__ = ["draw_merge_rate", "draw_metrics", "draw_savings", "draw_stage_tree", "draw_timeline", "png", "save"]

_DRAW: dict[str, Callable[[Any], Figure]] = {
    "savings": savings.draw,
    "stage_tree": stage_tree.draw,
    "metrics": metrics.draw,
    "timeline": timeline.draw,
    "merge_rate": merge_rate.draw,
}


def png(name: str, view: object) -> bytes:
    """A picture of :mod:`hpstage.report.gallery`, from its view."""
    return style.png(_DRAW[name](view))


def draw_savings(book: Book) -> Figure:
    """Above, worker time by cause (:mod:`hpstage.report.causes` tells what is assumed); below, what workers did."""
    return savings.draw(causes_of(book))


def draw_stage_tree(book: Book) -> Figure:
    """Each node a line from the step where it begins to where the book's trials leave it; the best trial's way marked.

    Colour is the best value of the metric found on a line or below it, and, for dots, the value measured there; width
    is the number of trials that train as one. Of a tree with more than 140 rows, those lines are drawn that most trials
    go along, among equals the best; a tick shows where others part, and the legend tells how many.
    """
    return stage_tree.draw(stage_tree_view(book))


def draw_metrics(book: Book) -> Figure:
    """The first objective against the training step; each node is drawn once, and the best trial's way on top."""
    return metrics.draw(metrics_view(book))


def draw_timeline(book: Book) -> Figure:
    """One row per worker, in the order in which they began; x in time since the first began.

    Beside a worker's name stands its share of busy time in the calls for which it worked, from their first stage to
    their last. Pauses between calls are left out.
    """
    return timeline.draw(timeline_view(book))


def draw_merge_rate(book: Book) -> Figure:
    """Above the merge rate (steps asked / distinct steps), below the steps, against time."""
    return merge_rate.draw(merge_rate_view(book))
