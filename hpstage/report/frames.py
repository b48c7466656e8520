"""Tidy data frames of a plan, from its journal only. They need pandas (``pip install "hpstage[report]"``).

These are the tables of :mod:`hpstage.accounting.tables`, which documents their columns and sums.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpstage.accounting import tables
from hpstage.accounting.book import open_book
from hpstage.accounting.tables import Table
from hpstage.errors import UsageError
from hpstage.plan.facts import Fact
from hpstage.store import Journal

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of a plan; their columns are described by the functions of :mod:`hpstage.accounting.tables`."""

    trials: pd.DataFrame
    stages: pd.DataFrame
    states: pd.DataFrame
    workers: pd.DataFrame
    events: pd.DataFrame


def frames(source: Journal | str | os.PathLike[str]) -> Frames:
    """Return the frames of a plan from the current state of its journal.

    Args:
        source: an open journal, or a store as for ``optimize(store=...)``: a folder, or the URL of a Redis server with
            the plan's ``?prefix=``. A store is opened, read and closed, and never changed.

    Raises:
        UsageError: pandas is not installed, or the URL names no plan.
        StoreError: the plan does not exist or cannot be read.
    """
    _pandas()
    facts: list[Fact] = []
    book = open_book(source, seen=facts.append)
    found = {**tables.tables_of(book), "events": tables.events(facts)}
    return Frames(**{name: frame_of(table) for name, table in found.items()})


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise UsageError('data frames need pandas: pip install "hpstage[report]"') from None
    return pandas


def frame_of(table: Table) -> pd.DataFrame:
    """Return a table as a data frame. Raises :class:`UsageError` without pandas."""
    pandas = _pandas()
    return pandas.DataFrame(
        {name: pandas.Series(values, dtype=table.types.get(name)) for name, values in table.columns.items()}
    )
