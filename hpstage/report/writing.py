"""Writing a report: its tables, its pictures, its figures, and the page last."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hpstage.errors import UsageError
from hpstage.report import tables
from hpstage.report.account import uncollected
from hpstage.report.book import Book
from hpstage.report.files import replacing
from hpstage.report.sums import savings_of

_TABLES = (tables.trials, tables.stages, tables.states, tables.workers)

Job = Callable[[Book], bytes]
Start = Callable[[Job], Callable[[], bytes]]
"""Starts a job, at the latest when what it returns is called, which gives the job's result."""


def write_book(folder: Path, book: Book, *, processes: int = 1) -> Path:
    """Write the report of a book into ``folder`` and return its first page: see :func:`hpstage.report.write_report`.

    Args:
        processes: with more than one, tables and pictures are made in so many forks of this process, which must have
            no other threads.

    Raises:
        UsageError: something cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with uncollected():
            if processes == 1:
                return _write(folder, book, lambda job: partial(job, book))
            with _forks(book, processes) as start:
                return _write(folder, book, start)
    except OSError as error:
        raise UsageError(f"cannot write to {str(folder)!r}: {error.strerror or error}; give another folder") from error


def _write(folder: Path, book: Book, start: Start) -> Path:
    writing = [start(partial(_write_table, number, folder)) for number in range(len(_TABLES))]
    # Not before there are forks: these bring NumPy, and with it threads.
    from hpstage.report.gallery import PICTURES
    from hpstage.report.page import page

    drawing = [start(partial(_draw, number)) for number in range(len(PICTURES))]
    saved = savings_of(book)
    with replacing(folder / "savings.json") as path:
        path.write_text(json.dumps(saved.as_dict(), indent=2) + "\n", encoding="utf-8")
    for wait in writing:
        wait()
    pictures = {picture: wait() for picture, wait in zip(PICTURES, drawing, strict=True)}
    for picture, png in pictures.items():
        with replacing(folder / f"{picture.name}.png") as path:
            path.write_bytes(png)
    first = folder / "index.html"
    with replacing(first) as path:
        path.write_text(page(book, saved, pictures), encoding="utf-8")
    return first


def _write_table(number: int, folder: Path, book: Book) -> bytes:
    table = _TABLES[number]
    with replacing(folder / f"{table.__name__}.csv") as path:
        table(book).write_csv(path)
    return b""


def _draw(number: int, book: Book) -> bytes:
    from hpstage.report.gallery import PICTURES

    return PICTURES[number].png(book)


# --- forks ------------------------------------------------------------------------------------------------


@contextmanager
def _forks(book: Book, processes: int) -> Iterator[Start]:
    """Forks of this process, which have all that the book holds without being sent it."""
    forking = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, forking, initializer=_hold, initargs=(book,)) as pool:
        yield lambda job: pool.submit(_do, job).result


_held: list[Book] = []


def _hold(book: Book) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C one traceback is enough
    _held.append(book)


def _do(job: Job) -> bytes:
    return job(_held[0])
