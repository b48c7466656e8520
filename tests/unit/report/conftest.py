"""A search that several pictures draw."""

from __future__ import annotations

import pytest

import hpstage
from hpstage.accounting.book import Book, open_book
from tests.unit.pictures import search


@pytest.fixture(scope="module")
def searched() -> tuple[hpstage.Result, Book]:
    result, journal = search()
    return result, open_book(journal, "study")
