"""The pictures of a report, in the order in which its page shows them. Each has a module that computes its content and
draws it with matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from hpstage.report.book import Book
from hpstage.report.pictures.merge_rate import draw_merge_rate
from hpstage.report.pictures.metrics import draw_metrics
from hpstage.report.pictures.savings import draw_savings
from hpstage.report.pictures.stage_tree import draw_stage_tree
from hpstage.report.pictures.style import save
from hpstage.report.pictures.timeline import draw_timeline

__all__ = [
    "PICTURES",
    "Picture",
    "draw_merge_rate",
    "draw_metrics",
    "draw_savings",
    "draw_stage_tree",
    "draw_timeline",
    "save",
]


@dataclass(frozen=True, slots=True)
class Picture:
    """``name`` is the file's name without ``.png``."""

    name: str
    title: str
    caption: str
    draw: Callable[[Book], Figure]


PICTURES = (
    Picture(
        "savings",
        "Savings by cause",
        "From what all trials would have taken alone, trained to their ends, to what workers spent; below, on what.",
        draw_savings,
    ),
    Picture(
        "stage_tree",
        "Stage tree",
        "Each line is trained once, for all trials that run along it: the wider, the more. Labels tell what changes "
        "where lines part; at their ends stand trials with their metric, and what there is no room for.",
        draw_stage_tree,
    ),
    Picture(
        "metrics",
        "Metric",
        "What was measured along each line of the tree, and between a line and those that part from it.",
        draw_metrics,
    ),
    Picture(
        "timeline",
        "Worker timeline",
        "What each worker did, and its share of busy time. Successive stages of training alternate between two blues.",
        draw_timeline,
    ),
    Picture(
        "merge_rate",
        "Merge rate",
        "Steps asked over distinct steps, as the search went on; below, the steps themselves.",
        draw_merge_rate,
    ),
)
