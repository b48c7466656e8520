"""The pictures of a report, in the order in which the page shows them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from matplotlib.figure import Figure

from hpstage.report.book import Book
from hpstage.report.stage_tree import draw_stage_tree
from hpstage.report.timeline import draw_timeline


@dataclass(frozen=True, slots=True)
class Picture:
    """``name`` is that of its file, without ``.png``."""

    name: str
    title: str
    caption: str
    draw: Callable[[Book], Figure]

    def png(self, book: Book) -> bytes:
        buffer = io.BytesIO()
        save(self.draw, book, buffer, "png")
        return buffer.getvalue()


def save(draw: Callable[[Book], Figure], book: Book, file: BinaryIO | Path, format: str) -> None:
    """Draw a picture of a book into a file. ``format``: png, svg, pdf, ..."""
    with warnings.catch_warnings():
        # A name in a script that matplotlib's fonts lack is drawn as boxes, which says enough.
        warnings.filterwarnings("ignore", r"Glyph .* missing from")
        draw(book).savefig(file, format=format)


PICTURES = (
    Picture(
        "timeline",
        "Worker timeline",
        "What each worker did, and its share of busy time. Successive stages of training alternate between two blues.",
        draw_timeline,
    ),
    Picture(
        "stage_tree",
        "Stage tree",
        "Each line is trained once, for all trials that run along it: the thicker, the more. Dots are evaluations. "
        "Where there is room, the numbers at a line's end name the trials that end somewhere on it.",
        draw_stage_tree,
    ),
)
