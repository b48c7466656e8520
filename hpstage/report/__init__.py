"""Reports of a search: tables and data frames of a plan, and a page with pictures. They are made from the journal only.

Modules that need matplotlib or jinja2 are imported when a report is written, since reading a store does not need them.
"""

from __future__ import annotations

import importlib
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpstage.accounting.book import Book, Searched, open_book
from hpstage.accounting.causes import Causes, causes_of
from hpstage.report.frames import Frames, frames
from hpstage.store import Journal

if TYPE_CHECKING:
    from hpstage.report.pictures import (
        draw_beside_alone,
        draw_merge_rate,
        draw_metrics,
        draw_parameters,
        draw_savings,
        draw_stage_tree,
        draw_timeline,
        save,
    )
    from hpstage.report.trackers.live import MLflowCallback, TensorBoardCallback, WeightsAndBiasesCallback

__all__ = [
    "Book",
    "Causes",
    "Frames",
    "MLflowCallback",
    "TensorBoardCallback",
    "WeightsAndBiasesCallback",
    "causes_of",
    "draw_beside_alone",
    "draw_merge_rate",
    "draw_metrics",
    "draw_parameters",
    "draw_savings",
    "draw_stage_tree",
    "draw_timeline",
    "frames",
    "open_book",
    "save",
    "write_report",
]

# The modules of the names that are imported on first use.
_HOMES = {name: "trackers.live" for name in __all__ if name.endswith("Callback")}
_HOMES |= {name: "pictures" for name in __all__ if name.startswith(("draw_", "save"))}


def __getattr__(name: str) -> Any:
    if name in ("book", "causes", "logs", "tables"):  # modules that were moved after 0.3
        return importlib.import_module(f"hpstage.report.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(f"hpstage.report.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'hpstage.report' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def write_report(
    folder: str | PathLike[str],
    source: Journal | str | PathLike[str] | Searched,
    *,
    study: str | None = None,
    tables: bool = True,
) -> Path:
    """Write the report of a plan, or of one of its studies, into ``folder`` (created if needed); return its page's
    path.

    ``index.html`` holds the whole report, pictures included. Next to it are the pictures (``*.svg``), the savings
    (``savings.json``) and the tables of :mod:`hpstage.accounting.tables` (``trials.csv``, ``stages.csv``,
    ``states.csv``, ``workers.csv``). Files of an earlier report are replaced, the page last.

    Args:
        source: an open journal; a store as for ``optimize(store=...)``, which is read and never changed, even while
            searches are running; or the result of a search.
        study: the study to report. Defaults to the whole plan, or to the study of a result.
        tables: whether to write the tables. If not, those of an earlier report are left as they are.

    Raises:
        UsageError: the plan has no such study, or the folder cannot be written to.
        StoreError: the plan does not exist or cannot be read.
    """
    book = open_book(source, study)
    from hpstage.report.page import write_book  # imports matplotlib

    return write_book(Path(folder), book, tables=tables)
