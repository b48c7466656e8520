"""The process that draws beside: the same pictures, and none is lost if it dies."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path

import pytest

from hpstage.report.book import Book, open_book
from hpstage.report.drawing import Drawer, DrawerBeside
from hpstage.report.gallery import PICTURES
from tests.unit.reports import search


@pytest.fixture(scope="module")
def book() -> Book:
    return open_book(search(n_trials=6))


pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="processes are forked on Linux")


def drawn(drawer: Drawer, book: Book) -> dict[str, bytes]:
    for picture in PICTURES:
        drawer.draw(picture.name, picture.view(book))
    return drawer.drawn()


def test_pictures_drawn_beside_are_those_drawn_here(book: Book) -> None:
    with DrawerBeside() as beside, Drawer() as here:
        found = drawn(beside, book)
        assert found == drawn(here, book)
    assert set(found) == {picture.name for picture in PICTURES}
    assert all(png.startswith(b"\x89PNG") for png in found.values())


@pytest.mark.parametrize("after", [0, 2, len(PICTURES)])
def test_if_the_process_dies_what_it_had_begun_and_the_rest_are_drawn_here(book: Book, after: int) -> None:
    with DrawerBeside() as drawer:
        for index, picture in enumerate(PICTURES):
            if index == after:
                os.kill(drawer.pid, signal.SIGKILL)
            drawer.draw(picture.name, picture.view(book))
        if after == len(PICTURES):
            os.kill(drawer.pid, signal.SIGKILL)
        found = drawer.drawn()
    assert found == drawn(Drawer(), book)


def test_what_cannot_be_drawn_is_told_where_it_was_asked_for(book: Book) -> None:
    with DrawerBeside() as drawer:
        drawer.draw("timeline", "not a view")
        with pytest.raises(AttributeError, match="has no attribute 'workers'"):
            drawer.drawn()


def test_the_process_is_gone_when_the_drawer_is_closed_and_when_something_is_raised() -> None:
    with pytest.raises(KeyError), DrawerBeside() as drawer:
        raise KeyError
    with pytest.raises(ProcessLookupError):
        os.kill(drawer.pid, 0)


def test_views_are_small() -> None:
    """They are sent from process to process."""
    large = open_book(search(n_trials=300))
    for picture in PICTURES:
        assert len(pickle.dumps(picture.view(large))) < 2**20
