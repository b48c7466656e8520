"""Drawing the pictures of a report: in this process, or in one beside it, which gets ready while a journal is read."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.connection import Connection
from types import TracebackType


class Drawer:
    """Draws in this process."""

    def __init__(self) -> None:
        self._drawn: dict[str, bytes] = {}

    def draw(self, name: str, view: object) -> None:
        """Begin with a picture of :mod:`hpstage.report.gallery`. ``view``: what it shows."""
        self._drawn[name] = _png(name, view)

    def drawn(self) -> dict[str, bytes]:
        """All pictures, as PNG."""
        return self._drawn

    def close(self) -> None:
        """Nothing more is to be drawn."""

    def __enter__(self) -> Drawer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class DrawerBeside(Drawer):
    """Draws in a fork of this process, which must have no other threads.

    It is forked at once, before there is anything to draw: loading matplotlib takes as long as drawing three pictures.
    """

    def __init__(self) -> None:
        super().__init__()
        forking = multiprocessing.get_context("fork")
        self._connection, there = forking.Pipe()
        self._process = forking.Process(target=_serve, args=(there, self._connection), daemon=True)
        self._process.start()
        there.close()
        self._begun: tuple[str, object] | None = None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def draw(self, name: str, view: object) -> None:
        # One at a time: were both sides to send, both would wait for the other to receive.
        self._finish()
        self._begun = name, view
        try:
            self._connection.send(self._begun)
        except OSError:
            self._finish()

    def drawn(self) -> dict[str, bytes]:
        self._finish()
        return super().drawn()

    def _finish(self) -> None:
        if self._begun is None:
            return
        (name, view), self._begun = self._begun, None
        try:
            self._drawn[name] = self._connection.recv()
        except (EOFError, OSError):
            super().draw(name, view)  # it is gone; if the picture was too much for it, the error is told from here

    def close(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.join()


def _serve(connection: Connection, other: Connection) -> None:
    """Draw what is asked for, until nobody can ask any more."""
    other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C one traceback is enough
    import hpstage.report.pictures  # noqa: F401  now, while there is nothing to draw

    try:
        while True:
            name, view = connection.recv()
            connection.send(_png(name, view))
    except Exception:
        return


def _png(name: str, view: object) -> bytes:
    from hpstage.report.pictures import png

    return png(name, view)
