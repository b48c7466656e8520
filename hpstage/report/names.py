"""Names typed by users, as shown in pictures."""

from __future__ import annotations

from hpstage.plan.facts import TrialId
from hpstage.report.book import Book
from hpstage.text import clean

_MOST = 60  # maximum number of characters of a name


def plain(name: object, most: int = _MOST) -> str:
    """Return a name typed by a user on one line, with at most ``most`` characters."""
    text = clean(name)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def trial_name(book: Book, trial: TrialId) -> str:
    """Return the trial's number in its study, or the end of its id if it has no number."""
    number = book.number(trial)
    return plain(trial.rpartition("/")[2], 12) if number is None else str(number)
