"""What was searched: tables and data frames of a plan, and its report (a page, its pictures). From the journal alone.

What needs matplotlib is loaded when a report is written: who only reads a store has no use for it.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from hpstage.report.book import Book, book_of, open_book
from hpstage.report.frames import Frames, frames
from hpstage.store import Journal

if TYPE_CHECKING:
    from hpstage.result import Result

__all__ = ["Book", "Frames", "frames", "open_book", "write_report"]


def write_report(
    folder: str | PathLike[str], source: Journal | str | PathLike[str] | Result, *, study: str | None = None
) -> Path:
    """Write the report of a plan, or of one of its studies, into ``folder`` (made if needed) and return its first page.

    ``index.html`` holds everything that is to be read, pictures included. Beside it lie the pictures (``*.png``), the
    figures (``savings.json``) and the tables of :mod:`hpstage.report.tables` (``trials.csv``, ``stages.csv``,
    ``states.csv``, ``workers.csv``). Files of an earlier report are replaced, the page last.

    Args:
        source: an open journal; a store as for ``optimize(store=...)``, which is read and not changed, also while
            searches run; or the result of a search.
        study: the one that is reported. If it is not given: all of the plan; of a result its own.

    Raises:
        UsageError: the plan has no such study, or nothing can be written in the folder.
        StoreError: there is no plan, or it cannot be read.
    """
    from hpstage.report.writing import write_book

    if isinstance(source, (Journal, str, PathLike)):
        book = open_book(source, study)
    else:
        book = book_of(source.journal, study or source.search or source.study.study_name)
    return write_book(Path(folder), book)
