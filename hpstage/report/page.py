"""The page of a report: one self-contained HTML file. Its text is in ``page.html``."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from jinja2 import Environment, PackageLoader, StrictUndefined

from hpstage.driver.differences import explain
from hpstage.plan.facts import SearchStarted, TrialId
from hpstage.plan.savings import Savings
from hpstage.report.book import Book
from hpstage.report.pictures import Picture
from hpstage.report.studies import study_rows
from hpstage.report.sums import failures_of
from hpstage.report.tree.embed import frame
from hpstage.schedule import Constant, Schedule
from hpstage.text import count_of, duration, paid_hours, shortened

_NAMES = 12  # number of trials named
_PIECES = 12  # number of pieces of a schedule shown
_TEXT = 300  # number of characters of a value or a summary


def page(book: Book, saved: Savings, pictures: Iterable[tuple[Picture, bytes]], *, tables: bool) -> str:
    """Return the whole page. All text from the user is escaped, and no external resource is loaded.

    Args:
        pictures: pictures with the content of their PNG files.
        tables: whether the tables lie beside the page as CSV files.
    """
    return (
        _environment()
        .get_template("page.html")
        .render(
            book=book,
            books=[Book(book.account, study) for study in book.studies],
            saved=saved,
            rows=study_rows(book, lambda study: False),
            failures=failures_of(book),
            pictures=[(picture, base64.b64encode(png).decode("ascii")) for picture, png in pictures],
            tables=tables,
            tree=frame(book) if book.lanes else None,
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
        "paid_hours": paid_hours,
        "percent": "{:.1%}".format,
        "short": _short,
        "thousands": "{:,}".format,
    }
    helpers = (best_first, explain, named, names_of, number_of, objectives_of, params_of, pieces_of)
    found.globals |= {helper.__name__: helper for helper in helpers}
    return found


# --- used by the template ------------------------------------------------------------------------------------


def objectives_of(started: SearchStarted) -> str:
    directions = [f" ({direction})" for direction in started.directions] or [""] * len(started.metric)
    return ", ".join(map("".join, zip(started.metric, directions, strict=True)))


def best_first(book: Book) -> list[TrialId]:
    sign = -1.0 if book.maximize else 1.0
    return sorted(book.values, key=lambda id: sign * book.values[id][0])


def pieces_of(schedule: Schedule, steps: int) -> list[str]:
    """Describe a schedule over the first ``steps`` steps: its value, or how it changes from step to step."""
    pieces = [(start, min(stop or steps, steps), form) for start, stop, form in schedule.pieces() if start < steps]
    told = []
    for start, stop, form in pieces[:_PIECES]:
        if isinstance(form, Constant):
            said = _short(form.scalar)
        else:
            said = f"{type(form).__name__.lower()}, {_short(form.value(start))} to {_short(form.value(stop - 1))}"
        told.append(said if len(pieces) == 1 else f"steps {start:,} to {stop:,}: {said}")
    if len(pieces) > _PIECES:
        told.append(f"and {len(pieces) - _PIECES:,} more")
    return told


def params_of(book: Book, id: TrialId) -> Mapping[str, object]:
    proposed = book.account.plan.searches.proposed.get(id)
    return {} if proposed is None else proposed.params


def names_of(book: Book, trials: Iterable[TrialId]) -> list[str]:
    """Return the names of all parameters that any of the trials has."""
    return list(dict.fromkeys(name for id in trials for name in params_of(book, id)))


def number_of(book: Book, id: TrialId) -> str:
    number = book.number(id)
    return id if number is None else str(number)


def named(book: Book, trials: list[TrialId]) -> str:
    """Return the trials that a failure has failed, in parentheses."""
    if not trials:
        return ""
    names = ", ".join(number_of(book, id) for id in trials[:_NAMES])
    more = f" and {len(trials) - _NAMES:,} more" if len(trials) > _NAMES else ""
    return f" (trial{'' if len(trials) == 1 else 's'} {names}{more})"


def _short(value: object) -> str:
    return shortened(value, _TEXT)
