"""Write a report: tables, savings, pictures, and the page, one self-contained HTML file (template: ``page.html``)."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from hpstage.accounting.book import Book
from hpstage.accounting.failures import by_cause, failed_otherwise, failures_of, where
from hpstage.accounting.savings import Savings, skipped_work
from hpstage.accounting.studies import study_rows
from hpstage.accounting.tables import tables_of
from hpstage.driver.differences import explain
from hpstage.errors.text import busy_share, count_of, duration, rate, shortened, size
from hpstage.plan.facts import NodeId, SearchStarted, TrialId
from hpstage.plan.nodes import PlannedTrial
from hpstage.plan.uncollected import uncollected
from hpstage.report.files import refusing, replacing
from hpstage.report.names import trial_name
from hpstage.report.pictures import HALF, NARROW, PICTURES, Picture
from hpstage.report.pictures.style import svg
from hpstage.report.tree.embed import frame
from hpstage.schedule import Constant, Schedule
from hpstage.schedule import __all__ as schedule_names

_NAMES = 12  # number of trials named
_PIECES = 12  # number of pieces of a schedule shown
_TEXT = 300  # number of characters of a value or a summary


def page(book: Book, saved: Savings, pictures: Mapping[Picture, tuple[bytes, bytes]], *, tables: bool) -> str:
    """Return the whole page. All text from the user is escaped, and no external resource is loaded.

    Args:
        pictures: the SVG files of each picture, for wide and for narrow windows.
        tables: whether CSV files of the tables are written, to link to.
    """
    causes = by_cause(failures_of(book))
    return (
        _environment()
        .get_template("page.html")
        .render(
            book=book,
            books=[Book(book.account, study) for study in book.studies],
            saved=saved,
            audited=book.account.audits.line(book.account.plan),
            rows=study_rows(book, lambda study: False),
            causes=causes,
            failed_otherwise=failed_otherwise(book, causes),
            # Embedded as images: scripts in them would not run.
            pictures={picture.name: (picture, *map(_as_url, files)) for picture, files in pictures.items()},
            tables=tables,
            tree=frame(book) if book.branches else None,
        )
    )


def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("hpstage", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "count_of": count_of,
        "day": lambda at: datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "duration": duration,
        "busy_share": busy_share,
        "rate": rate,
        "percent": "{:.1%}".format,
        "short": _short,
        "size": size,
        "thousands": "{:,}".format,
    }
    helpers = (
        as_python,
        best_first,
        explain,
        named,
        names_of,
        objectives_of,
        params_of,
        pieces_of,
        state_of,
        trial_name,
    )
    found.globals |= {helper.__name__: helper for helper in (*helpers, skipped_work, where)}
    return found


# --- used by the template ------------------------------------------------------------------------------------


def objectives_of(started: SearchStarted) -> str:
    directions = [f" ({direction})" for direction in started.directions] or [""] * len(started.metric)
    return ", ".join(map("".join, zip(started.metric, directions, strict=True)))


def best_first(book: Book) -> list[list[TrialId]]:
    """Return the completed trials, the best feasible one first. Trials with identical training are one group."""
    found: dict[tuple[NodeId, int], list[TrialId]] = {}
    for id in book.best_first:
        last = book.trials[id].requested
        found.setdefault((book.trials[id].node_at(last).id, last), []).append(id)
    return list(found.values())


def pieces_of(schedule: Schedule, steps: int) -> list[str]:
    """Describe a schedule over the first ``steps`` steps: its value, or how it changes from step to step."""
    pieces = [(start, min(stop or steps, steps), form) for start, stop, form in schedule.pieces() if start < steps]
    described = []
    for start, stop, form in pieces[:_PIECES]:
        if isinstance(form, Constant):
            text = _short(form.scalar)
        else:
            text = f"{type(form).__name__.lower()}, {_short(form.value(start))} to {_short(form.value(stop - 1))}"
        described.append(text if len(pieces) == 1 else f"steps {start:,} to {stop:,}: {text}")
    if len(pieces) > _PIECES:
        described.append(f"and {len(pieces) - _PIECES:,} more")
    return described


def as_python(trial: PlannedTrial) -> str:
    """Return Python code that trains the trial. Its steps on the trial's store are reused, also after changes to later
    steps."""
    written = {}
    for name, schedule in sorted(trial.schedules.items()):
        [(_, _, form), *more] = schedule.pieces()
        whole = repr(schedule).removesuffix(f".until({trial.requested})")
        written[name] = repr(form.scalar) if isinstance(form, Constant) and not more else whole
    values = "".join(f"    {name!r}: {text},\n" for name, text in written.items())
    used = sorted({*re.findall(r"(?<![.\w])[A-Za-z_]+(?=\()", values)} & {*schedule_names})
    imports = f"from hpstage.schedule import {', '.join(used)}\n" if used else ""
    return (
        f"import hpstage\n{imports}\nhyperparameters = {{\n{values}}}\n"
        f"trial = hpstage.train(trainable, hyperparameters, steps={trial.requested}, store=store)\n"
    )


def state_of(book: Book, id: TrialId) -> str:
    ended = book.account.plan.ended.get(id)
    return "unfinished" if ended is None else ended.state.lower()


def params_of(book: Book, id: TrialId) -> Mapping[str, object]:
    proposed = book.account.plan.searches.proposed.get(id)
    return {} if proposed is None else proposed.params


def names_of(book: Book, trials: Iterable[TrialId]) -> list[str]:
    """Return the names of all parameters that any of the trials has."""
    return list(dict.fromkeys(name for id in trials for name in params_of(book, id)))


def named(book: Book, trials: Collection[TrialId]) -> str:
    """Return the names of trials as text: ``trials 3, 5, 8 and 4 more``."""
    names = ", ".join(trial_name(book, id) for id in islice(trials, _NAMES))
    more = f" and {len(trials) - _NAMES:,} more" if len(trials) > _NAMES else ""
    return f"trial{'' if len(trials) == 1 else 's'} {names}{more}"


def _as_url(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode('ascii')}"


def _short(value: object) -> str:
    return shortened(value, _TEXT)


def write_book(folder: Path, book: Book, *, tables: bool = True) -> Path:
    """Write the report of a book into ``folder``, its page last; return the page's path.

    Raises:
        UsageError: a file cannot be written.
    """
    with refusing(folder, another="folder"), uncollected():
        folder.mkdir(parents=True, exist_ok=True)
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
    return usual, usual if picture.width > HALF else svg(figure, NARROW)  # a wide picture stays wide
