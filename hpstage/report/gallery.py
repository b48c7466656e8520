"""The pictures of a report, in the order in which the page shows them. Without matplotlib: what they show is worked out
here, and drawn in :mod:`hpstage.report.pictures`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpstage.report.book import Book
from hpstage.report.causes import causes_of
from hpstage.report.views.merge_rate import merge_rate_view
from hpstage.report.views.metrics import metrics_view
from hpstage.report.views.stage_tree import stage_tree_view
from hpstage.report.views.timeline import timeline_view


@dataclass(frozen=True, slots=True)
class Picture:
    """``name`` is that of its file, without ``.png``."""

    name: str
    title: str
    caption: str
    view: Callable[[Book], object]


PICTURES = (
    Picture(
        "savings",
        "Savings by cause",
        "From what all trials would have taken alone, trained to their ends, to what workers spent; below, on what.",
        causes_of,
    ),
    Picture(
        "stage_tree",
        "Stage tree",
        "Each line is trained once, for all trials that run along it: the thicker, the more. Dots are evaluations. "
        "Where there is room, the numbers at a line's end name the trials that end somewhere on it.",
        stage_tree_view,
    ),
    Picture(
        "metrics",
        "Metric",
        "What was measured along each line of the tree, and between a line and those that part from it.",
        metrics_view,
    ),
    Picture(
        "timeline",
        "Worker timeline",
        "What each worker did, and its share of busy time. Successive stages of training alternate between two blues.",
        timeline_view,
    ),
    Picture(
        "merge_rate",
        "Merge rate",
        "Steps asked over distinct steps, as the search went on; below, the steps themselves.",
        merge_rate_view,
    ),
)
