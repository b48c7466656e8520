"""Writing a report: its pictures, its tables, its figures, and the page last."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from hpstage.errors import UsageError
from hpstage.report.account import uncollected
from hpstage.report.book import Book
from hpstage.report.drawing import Drawer
from hpstage.report.files import replacing
from hpstage.report.gallery import PICTURES, Picture
from hpstage.report.page import page
from hpstage.report.sums import savings_of
from hpstage.report.tables import stages, states, trials, workers

_TABLES = (trials, stages, states, workers)
# What takes long to draw is followed by what takes long to work out.
_ORDER = ("stage_tree", "savings", "metrics", "timeline", "merge_rate")


def write_book(folder: Path, book: Book, drawer: Drawer, *, tables: bool = True) -> Path:
    """Write the report of a book into ``folder`` and return its first page: see :func:`hpstage.report.write_report`.

    Raises:
        UsageError: something cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with uncollected():
            return _write(folder, book, drawer, tables=tables)
    except OSError as error:
        raise UsageError(f"cannot write to {str(folder)!r}: {error.strerror or error}; give another folder") from error


def _write(folder: Path, book: Book, drawer: Drawer, *, tables: bool) -> Path:
    views = {picture.name: picture.view for picture in PICTURES}
    for name in _ORDER:
        drawer.draw(name, views[name](book))
    for table in _TABLES if tables else ():
        with replacing(folder / f"{table.__name__}.csv") as path:
            table(book).write_csv(path)
    saved = savings_of(book)
    with replacing(folder / "savings.json") as path:
        path.write_text(json.dumps(saved.as_dict(), indent=2) + "\n", encoding="utf-8")

    def pictures() -> Iterator[tuple[Picture, bytes]]:
        drawn = drawer.drawn()
        for picture in PICTURES:
            with replacing(folder / f"{picture.name}.png") as path:
                path.write_bytes(drawn[picture.name])
            yield picture, drawn[picture.name]

    text = page(book, saved, pictures(), tables=tables)
    first = folder / "index.html"
    with replacing(first) as path:
        path.write_text(text, encoding="utf-8")
    return first
