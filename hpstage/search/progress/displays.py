"""Displays: below the other output of a terminal, in a notebook's cell, or as lines of a log."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO, TextIOBase
from threading import RLock
from typing import Any, TextIO, cast

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.text import Text

from hpstage.errors.text import clean, writable
from hpstage.search.progress.view import Display, ProgressView, items, line, times, trials

_BAR = (10, 40)
"""Minimum and maximum columns of the bar; it is omitted if there is less room."""
_BETWEEN = " · "


@dataclass(frozen=True, slots=True)
class Rendered:
    """A view on as many lines as the console's width requires. Names are shown literally, not as markup."""

    view: ProgressView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text in self._lines(console, options):
            text.truncate(options.max_width, overflow="crop" if options.ascii_only else "ellipsis")
            yield text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(20, options.max_width), options.max_width)

    def _lines(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = options.max_width
        between = " - " if options.ascii_only else _BETWEEN
        yield self._header(console, options)
        for packed in _packed(
            [writable(text, options.encoding) for text in (*items(self.view), times(self.view))], width, between
        ):
            text = Text(packed)
            text.highlight_regex(r"(?<![\w\\])\d[\d,.:]*(e[-+]\d+)?(?!\w)", "bold")
            text.highlight_regex(r"\b[\d,]+ failed", "bold red")
            yield text

    def _header(self, console: Console, options: ConsoleOptions) -> Text:
        """Return the name, the bar and the number of trials, as far as there is room."""
        view, width = self.view, options.max_width
        count = trials(view)
        left = width - len(count) - 2
        known = writable(clean(view.study), options.encoding)
        if cell_len(known) > max(8, left // 2):
            known = set_cell_size(known, max(8, left // 2) - 1).rstrip() + ("~" if options.ascii_only else "…")
        header = Text(known, "bold", end="")
        columns = min(_BAR[1], left - cell_len(known) - 2)
        if view.n_trials and columns >= _BAR[0]:
            header.append("  ")
            done, whole = view.finished, view.n_trials
            if whole == 1 and not done:  # a single run's bar moves by its steps
                done, whole = view.steps_trained, max(1, view.steps_trained + view.steps_left)
            bar = ProgressBar(
                whole,
                min(done, whole),
                width=columns,
                complete_style="cyan",  # distinguishable from the bar's grey with 16 colours
                finished_style="green",
            )
            for segment in console.render(bar, options.update(width=columns)):
                header.append(segment.text.rstrip("\n"), segment.style)
            header.append(" " * (cell_len(known) + 2 + columns - cell_len(header.plain)))
        header.append(f"  {count}", "bold")
        header.end = "\n"
        return header


def _packed(texts: Sequence[str], width: int, between: str) -> list[str]:
    """Pack the texts in order on as few lines of ``width`` columns as possible. Texts that are too wide are not cut."""
    lines: list[str] = []
    for text in texts:
        if lines and cell_len(lines[-1] + between + text) <= width:
            lines[-1] += between + text
        else:
            lines.append(text)
    return lines


_COLUMNS = 110  # of a notebook

UPDATE_SECONDS = 0.5
"""Minimum time between two updates in a notebook."""

LINE_SECONDS = 10.0
"""Minimum time between two lines of a log, except that the first and the last are written at once."""


def display_on_standard_error() -> Display:
    """Return a terminal display if standard error is a terminal that can move its cursor, else a line display."""
    stream = sys.stderr
    if _in_notebook():
        return NotebookDisplay(stream)
    if stream.isatty() and os.environ.get("TERM", "dumb").lower() not in ("dumb", "unknown", ""):
        return TerminalDisplay(stream)
    return LineDisplay(stream)


class LineDisplay(Display):
    """A log: a line at the start, at most one every :data:`LINE_SECONDS`, and one at the end. No control characters."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._next = 0.0

    def begin(self, view: ProgressView) -> None:
        self._next = self._clock() + LINE_SECONDS
        self._stream.write(_encodable(line(view), self._stream) + "\n")
        self._stream.flush()

    def write(self, text: str) -> None:
        self._stream.write(_encodable(text, self._stream) + "\n")
        self._stream.flush()

    def show(self, view: ProgressView) -> None:
        if self._clock() >= self._next:
            self.begin(view)

    def end(self, view: ProgressView) -> None:
        self.begin(view)


def _in_notebook() -> bool:
    """Whether output goes to a cell of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class NotebookDisplay(Display):
    """An output of the cell that is updated in place, a few lines of text."""

    def __init__(self, stream: TextIO) -> None:
        from IPython import display

        self._stream = stream
        self._next = 0.0
        self._ipython: Any = display
        self._handle: Any = None

    def begin(self, view: ProgressView) -> None:
        self._handle = self._ipython.display(self._html(view), display_id=True)

    def write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def show(self, view: ProgressView) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + UPDATE_SECONDS
            self._handle.update(self._html(view))

    def end(self, view: ProgressView) -> None:
        self._handle.update(self._html(view))

    def _html(self, view: ProgressView) -> Any:
        console = Console(file=StringIO(), record=True, width=_COLUMNS, force_jupyter=False)
        console.print(Rendered(view))
        return self._ipython.HTML(console.export_html(inline_styles=True, code_format="<pre>{code}</pre>"))


class TerminalDisplay(Display):
    """The last lines of a terminal, redrawn in place; all other output of this process is written above them.

    No terminal state is changed that would survive a kill: the cursor stays visible and rests on the line below. Output
    of other processes to the terminal (prints of local workers) is not tracked and may be overwritten.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = RLock()
        self._console = Console(file=stream, force_terminal=True)
        self._drawn = ""
        self._replaced: list[tuple[str, TextIO, _Above]] = []

    def begin(self, view: ProgressView) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            # A standard output that is redirected to a file stays redirected.
            if stream is not None and stream.isatty():
                above = _Above(stream, self._write_above)
                self._replaced.append((name, stream, above))
                setattr(sys, name, above)
        self._redirect_loggers({id(stream): cast(TextIO, above) for _, stream, above in self._replaced})
        self.show(view)

    def write(self, text: str) -> None:
        self._write_above(text + "\n")

    def show(self, view: ProgressView) -> None:
        with self._lock:
            self._put("", self._text(view))

    def end(self, view: ProgressView) -> None:
        for name, stream, above in self._replaced:
            if getattr(sys, name) is above:  # otherwise it has been replaced since, by code that will restore it
                setattr(sys, name, stream)
        self._redirect_loggers({id(above): stream for _, stream, above in self._replaced})
        with self._lock:
            self._put("".join(above.rest() for _, _, above in self._replaced), self._text(view))
            self._drawn = ""

    def _text(self, view: ProgressView) -> str:
        width, height = self._console.size
        with self._console.capture() as captured:
            # The last column stays free, since some terminals wrap when it is reached.
            self._console.print(Rendered(view), width=max(1, width - 1))
        # Lines scrolled off the top of the screen cannot be redrawn.
        lines = captured.get().splitlines(keepends=True)[: max(1, height - 1)]
        return _encodable("".join(lines), self._stream)

    def _write_above(self, text: str) -> None:
        with self._lock:
            self._put(text, self._drawn)

    def _put(self, above: str, below: str) -> None:
        """Move up to the start of the drawing and rewrite it in a single write, so that it is never seen half drawn."""
        up = self._drawn.count("\n")
        begin = f"\r\x1b[{up}A" if up else ""
        if above:
            begin += "\x1b[J" + _encodable(above, self._stream) + ("" if above.endswith("\n") else "\n")
        lines = below.replace("\n", "\x1b[K\n")
        self._stream.write(f"{begin}{lines}\x1b[J")
        self._stream.flush()
        self._drawn = below

    @staticmethod
    def _redirect_loggers(to: dict[int, TextIO]) -> None:
        """Redirect logging handlers that write to one of these streams to another one."""
        for logger in (logging.getLogger(), *logging.Logger.manager.loggerDict.values()):
            for handler in getattr(logger, "handlers", ()):
                if isinstance(handler, logging.StreamHandler) and id(handler.stream) in to:
                    handler.setStream(to[id(handler.stream)])


class _Above(TextIOBase):
    """Replaces a standard stream: whole lines are forwarded at once, an unfinished line on :meth:`rest`."""

    def __init__(self, stream: TextIO, write: Callable[[str], None]) -> None:
        self._stream = stream
        self._write = write
        self._begun = ""
        self._lock = RLock()

    def write(self, text: str) -> int:
        with self._lock:
            lines, newline, self._begun = (self._begun + text).rpartition("\n")
            if newline:
                self._write(lines + newline)
        return len(text)

    def rest(self) -> str:
        with self._lock:
            rest, self._begun = self._begun, ""
        return rest

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _encodable(text: str, stream: TextIO) -> str:
    """Escape the characters that the stream's encoding cannot represent."""
    return writable(text, getattr(stream, "encoding", None) or "utf-8")
