"""Display names for pictures and tables: names typed by users, names of trials and of workers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpstage.accounting.account import Account
from hpstage.accounting.book import Book
from hpstage.errors.text import clean
from hpstage.plan.facts import TrialId, WorkerId
from hpstage.plan.messages import host_of

_MOST = 60  # maximum number of characters of a name
_ADDRESS = re.compile(r"\w+://(?P<host>\[[^\]]*\]|[^:/\[]+)(:\d+|/\d+/\d+)")


def plain(name: object, most: int = _MOST) -> str:
    """Return a name typed by a user on one line, with at most ``most`` characters."""
    text = clean(name)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def trial_name(book: Book, trial: TrialId) -> str:
    """Return the trial's number in its study, or the end of its id if it has no number. In a book of several studies,
    the name of the study comes first."""
    number = book.number(trial)
    name = plain(trial.rpartition("/")[2], 24) if number is None else str(number)
    return name if len(book.studies) <= 1 else f"{plain(book.account.plan.study_of(trial))}/{name}"


def workers_in_order(account: Account) -> list[WorkerId]:
    """Return the workers of a plan in the order in which they started chains. A worker may occur several times."""
    return [host_of(chain.worker) for chain in account.chains.values()]


def worker_names(workers: Iterable[WorkerId]) -> dict[WorkerId, str]:
    """Return display names for workers. A worker that is named by its address is shown as host and number
    (``10.0.0.3 #2``), since a port means nothing to a reader. Workers of a host are numbered in the order given."""
    found: dict[WorkerId, str] = {}
    on: dict[str, int] = {}
    for worker in workers:
        if worker in found:
            continue
        address = _ADDRESS.fullmatch(worker)
        if address is None:
            found[worker] = clean(worker)
        else:
            host = clean(address["host"])
            on[host] = on.get(host, 0) + 1
            found[worker] = f"{host} #{on[host]}"
    return found
