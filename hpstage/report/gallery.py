"""The pictures of a report, in the order in which the page shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from hpstage.report.book import Book
from hpstage.report.merge_rate import draw_merge_rate
from hpstage.report.metric_curves import draw_metrics
from hpstage.report.savings import draw_savings
from hpstage.report.stage_tree import draw_stage_tree
from hpstage.report.style import png
from hpstage.report.timeline import draw_timeline


@dataclass(frozen=True, slots=True)
class Picture:
    """``name`` is that of its file, without ``.png``."""

    name: str
    title: str
    caption: str
    draw: Callable[[Book], Figure]

    def png(self, book: Book) -> bytes:
        return png(self.draw(book))


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
        "Each line is trained once, for all trials that run along it: the thicker, the more. Dots are evaluations. "
        "Where there is room, the numbers at a line's end name the trials that end somewhere on it.",
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
