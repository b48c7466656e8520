"""Writing a report: its tables, savings and pictures first, the page last."""

from __future__ import annotations

import json
from pathlib import Path

from hpstage.accounting.book import Book
from hpstage.accounting.tables import tables_of
from hpstage.plan.uncollected import uncollected
from hpstage.report.files import refusing, replacing
from hpstage.report.page import page
from hpstage.report.pictures import HALF, NARROW, PICTURES, Picture
from hpstage.report.pictures.style import svg


def write_book(folder: Path, book: Book, *, tables: bool = True) -> Path:
    """Write the report of a book into ``folder`` and return its page's path: see :func:`hpstage.report.write_report`.

    Raises:
        UsageError: a file cannot be written.
    """
    with refusing(folder, another="folder"), uncollected():
        folder.mkdir(parents=True, exist_ok=True)
        return _write(folder, book, tables=tables)


def _write(folder: Path, book: Book, *, tables: bool) -> Path:
    for name, table in tables_of(book).items() if tables else ():
        with replacing(folder / f"{name}.csv") as path:
            table.write_csv(path)
    saved = book.savings
    with replacing(folder / "savings.json") as path:
        path.write_text(json.dumps(saved.as_dict(), indent=2) + "\n", encoding="utf-8")
    pictures = {picture: _drawn(picture, book) for picture in PICTURES}
    for picture, (usual, _) in pictures.items():
        with replacing(folder / f"{picture.name}.svg") as path:
            path.write_bytes(usual)
    first = folder / "index.html"
    with replacing(first) as path:
        path.write_text(page(book, saved, pictures, tables=tables), encoding="utf-8")
    return first


def _drawn(picture: Picture, book: Book) -> tuple[bytes, bytes]:
    """Return the picture for wide and for narrow windows, as SVG."""
    figure = picture.draw(book)
    usual = svg(figure, picture.width)
    return usual, usual if picture.width > HALF else svg(figure, NARROW)  # what needs the width keeps it
