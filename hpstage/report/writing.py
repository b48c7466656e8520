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
from typing import TYPE_CHECKING

from hpstage.errors import UsageError
from hpstage.report.account import uncollected
from hpstage.report.book import Book
from hpstage.report.files import replacing
from hpstage.report.sums import savings_of
from hpstage.report.tables import stages, states, trials, workers

if TYPE_CHECKING:
    from hpstage.report.gallery import Picture

_TABLES = (trials, stages, states, workers)
# The forks begin with the first, this process with the last, whose sums it has worked out for the page. The stage tree
# and the metrics share what they work out, and so does the one process that draws both.
_ORDER = ("stage_tree", "metrics", "timeline", "merge_rate", "savings")

Job = Callable[[Book], bytes]
Start = Callable[[Job], Callable[[], bytes]]
"""Takes on a job. What it returns gives the job's result, and does the job if nobody has begun with it."""


def write_book(folder: Path, book: Book, *, tables: bool = True, processes: int = 1) -> Path:
    """Write the report of a book into ``folder`` and return its first page: see :func:`hpstage.report.write_report`.

    Args:
        processes: that tables and pictures are made in, this one among them; the others are its forks, and it must have
            no other threads.

    Raises:
        UsageError: something cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with uncollected():
            if processes == 1:
                return _write(folder, book, lambda job: partial(job, book), tables=tables)
            with _forks(book, processes - 1) as start:
                return _write(folder, book, start, tables=tables)
    except OSError as error:
        raise UsageError(f"cannot write to {str(folder)!r}: {error.strerror or error}; give another folder") from error


def _write(folder: Path, book: Book, start: Start, *, tables: bool) -> Path:
    drawing = {name: start(partial(_draw, name)) for name in _ORDER}
    # Not before there are forks: this brings NumPy, and with it threads.
    from hpstage.report.gallery import PICTURES
    from hpstage.report.page import page

    writing = [start(partial(_write_table, number, folder)) for number in range(len(_TABLES) if tables else 0)]
    saved = savings_of(book)
    with replacing(folder / "savings.json") as path:
        path.write_text(json.dumps(saved.as_dict(), indent=2) + "\n", encoding="utf-8")

    def pictures() -> Iterator[tuple[Picture, bytes]]:
        # What was given last to the forks is what they have not begun with.
        for wait in reversed(writing):
            wait()
        drawn = {name: wait() for name, wait in reversed(drawing.items())}
        for picture in PICTURES:
            with replacing(folder / f"{picture.name}.png") as path:
                path.write_bytes(drawn[picture.name])
            yield picture, drawn[picture.name]

    text = page(book, saved, pictures(), tables=tables)
    first = folder / "index.html"
    with replacing(first) as path:
        path.write_text(text, encoding="utf-8")
    return first


def _write_table(number: int, folder: Path, book: Book) -> bytes:
    table = _TABLES[number]
    with replacing(folder / f"{table.__name__}.csv") as path:
        table(book).write_csv(path)
    return b""


def _draw(name: str, book: Book) -> bytes:
    from hpstage.report.gallery import PICTURES

    [drawn] = [picture.png(book) for picture in PICTURES if picture.name == name]
    return drawn


# --- forks ------------------------------------------------------------------------------------------------


@contextmanager
def _forks(book: Book, number: int) -> Iterator[Start]:
    """Forks of this process, which have all that the book holds without being sent it."""
    forking = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(number, forking, initializer=_hold, initargs=(book,)) as pool:

        def start(job: Job) -> Callable[[], bytes]:
            future = pool.submit(_do, job)
            return lambda: job(book) if future.cancel() else future.result()

        yield start


_held: list[Book] = []


def _hold(book: Book) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C one traceback is enough
    _held.append(book)


def _do(job: Job) -> bytes:
    return job(_held[0])
