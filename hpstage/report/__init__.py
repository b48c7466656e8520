"""What was searched: data frames of a plan, and the report of a search (a page, its pictures, the rows behind)."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from hpstage.report.frames import Frames, frames

if TYPE_CHECKING:
    from hpstage.result import Result

__all__ = ["Frames", "frames", "write_report"]


def write_report(folder: str | PathLike[str], result: Result) -> Path:
    """Write the report of a search into ``folder`` (made if needed) and return its first page.

    ``index.html`` holds everything that is to be read, pictures included. Beside it lie ``timeline.png``,
    ``stage_tree.png``, ``savings.json``, ``trials.csv`` (a row per trial of the study) and ``stages.csv`` (a row per
    stage that this search trained). Files of an earlier report are replaced, the page last.
    """
    # Loaded here: they bring matplotlib, which those who read a store have no use for.
    from hpstage.plan import SearchPlan
    from hpstage.report.account import Account
    from hpstage.report.book import Book
    from hpstage.report.page import page
    from hpstage.report.rows import search_of, stage_rows, trial_rows
    from hpstage.report.stage_tree import draw_stage_tree
    from hpstage.report.style import png
    from hpstage.report.timeline import draw_timeline

    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    search = search_of(result)
    account = Account(SearchPlan(result.plan.workload, sharing=result.plan.sharing))
    for fact in result.journal:
        account.apply(fact)
    book = Book(account, (result.search or result.study.study_name) if search.started is not None else None)
    pictures = {
        "timeline.png": png(draw_timeline(book)),
        "stage_tree.png": png(draw_stage_tree(book)),
    }
    for name, picture in pictures.items():
        (place / name).write_bytes(picture)
    (place / "savings.json").write_text(json.dumps(result.savings.as_dict(), indent=2) + "\n", encoding="utf-8")
    _write_csv(place / "trials.csv", [row.as_dict() for row in trial_rows(result)])
    _write_csv(place / "stages.csv", [row.as_dict() for row in stage_rows(result, search)])
    first = place / "index.html"
    first.write_text(page(result, search, pictures), encoding="utf-8")
    return first


def _write_csv(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """One column per name that any row has, in order of appearance; ``None`` and missing values are left empty.

    Numbers are written so that reading them gives them back exactly.
    """
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
