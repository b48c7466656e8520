"""What was searched: tables and data frames of a plan, and its report (a page, its pictures). From the journal alone.

What needs matplotlib or jinja2 is loaded when a report is written: who only reads a store has no use for it.
"""

from __future__ import annotations

import importlib
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpstage.report.book import Book, Searched, open_book
from hpstage.report.frames import Frames, frames
from hpstage.store import Journal

if TYPE_CHECKING:
    from hpstage.report.causes import Causes, causes_of
    from hpstage.report.pictures import (
        draw_merge_rate,
        draw_metrics,
        draw_savings,
        draw_stage_tree,
        draw_timeline,
        save,
    )

__all__ = [
    "Book",
    "Causes",
    "Frames",
    "causes_of",
    "draw_merge_rate",
    "draw_metrics",
    "draw_savings",
    "draw_stage_tree",
    "draw_timeline",
    "frames",
    "open_book",
    "save",
    "write_report",
]

# Where those are that are loaded when they are first used.
_HOMES = {
    "Causes": "causes",
    "causes_of": "causes",
    "draw_merge_rate": "pictures",
    "draw_metrics": "pictures",
    "draw_savings": "pictures",
    "draw_stage_tree": "pictures",
    "draw_timeline": "pictures",
    "save": "pictures",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"hpstage.report.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'hpstage.report' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


def write_report(
    folder: str | PathLike[str],
    source: Journal | str | PathLike[str] | Searched,
    *,
    study: str | None = None,
    tables: bool = True,
) -> Path:
    """Write the report of a plan, or of one of its studies, into ``folder`` (made if needed) and return its first page.

    ``index.html`` holds everything that is to be read, pictures included. Beside it lie the pictures (``*.png``), the
    figures (``savings.json``) and the tables of :mod:`hpstage.report.tables` (``trials.csv``, ``stages.csv``,
    ``states.csv``, ``workers.csv``). Files of an earlier report are replaced, the page last.

    Args:
        source: an open journal; a store as for ``optimize(store=...)``, which is read and not changed, also while
            searches run; or the result of a search.
        study: the one that is reported. If it is not given: all of the plan; of a result its own.
        tables: write these, too. If not, those of an earlier report stay as they are.

    Raises:
        UsageError: the plan has no such study, or nothing can be written in the folder.
        StoreError: there is no plan, or it cannot be read.
    """
    from hpstage.report.writing import write_book

    return write_book(Path(folder), open_book(source, study), tables=tables)
