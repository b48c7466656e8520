"""Names that users typed, as they are shown in pictures."""

from __future__ import annotations

from hpstage.plan.facts import TrialId
from hpstage.report.book import Book
from hpstage.text import clean

_MOST = 60  # characters of a name


def plain(name: object, most: int = _MOST) -> str:
    """A name that a user typed, on one line and of at most ``most`` characters."""
    text = clean(name)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def trial_name(book: Book, trial: TrialId) -> str:
    """Its number in its study; the end of its id where no study numbered it."""
    number = book.number(trial)
    return plain(trial.rpartition("/")[2], 12) if number is None else str(number)
