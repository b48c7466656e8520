"""Formatting of numbers, durations, sizes, names and tables for people. Pure."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable, Sequence

_HOUR, _MINUTE = 3600, 60


def clean(name: object) -> str:
    """Return a name with its control characters (escape sequences, line ends, changes of direction) as ``\\x1b``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(name))


def writable(text: str, encoding: str = "utf-8") -> str:
    """Return a text in which characters that an encoding lacks are written as ``\\udce9``, e.g. for invalid bytes in
    the name of a file."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def clean_lines(text: str) -> str:
    """Return a text of several lines with the control characters of each as ``\\x1b``. Tabs stay: they are harmless."""
    return "\n".join("\t".join(map(clean, line.split("\t"))) for line in text.split("\n"))


def shortened(value: object, most: int = 80) -> str:
    """Return a value as text of at most ``most`` characters; a float has six significant digits."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that ``name`` may stand for: one with a similar spelling, or one whose initials it is
    (``wd`` of ``weight_decay``); ``None`` if there is none."""
    known = sorted(names)
    # Names of two letters are often similar by chance. And "unused" has similarity 0.6 to "seed", but is another word.
    like = difflib.get_close_matches(name, known, 1, 0.75) if len(name) > 2 else []
    initials = [one for one in known if len(name) > 1 and name == "".join(part[:1] for part in one.split("_"))]
    return next(iter([*like, *initials]), None)


def how_it_ended(status: int) -> str:
    """Return text such as ``left with exit status 1`` for the exit status of a process, which is below 0 after a
    signal."""
    if status == -signal.SIGKILL:
        return "was killed by SIGKILL (as the system does when memory runs out)"
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"left with exit status {status}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def other_format(what: str, found: int, known: int, remedy: str) -> str:
    """Return the message that another hpstage has written ``what``; ``remedy``: what to do if that is an older one."""
    age, remedy = ("a newer", "upgrade hpstage") if found > known else ("an older", remedy)
    return f"{what} was written by {age} hpstage (format {found}, this one reads {known}); {remedy}"


def count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rate(value: float) -> str:
    """Return a ratio as text, such as ``2.94``."""
    return f"{value:,.2f}"


def duration(seconds: float) -> str:
    """Return a duration in a suitable unit: ``20 ms``, ``1.5 s``, ``3.0 min``, ``2.25 h``."""
    if seconds == 0:
        return "0 s"
    if abs(seconds) < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    if abs(seconds) < 2 * _MINUTE:
        return f"{seconds:.1f} s"
    if abs(seconds) < 2 * _HOUR:
        return f"{seconds / _MINUTE:.1f} min"
    return f"{seconds / _HOUR:,.2f} h"


def clock(seconds: float) -> str:
    """Return a duration as ``h:mm:ss``, rounded."""
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes // 60:,}:{minutes % 60:02d}:{left:02d}"


def time_left(seconds: float) -> str:
    """Return an estimate in round numbers: ``about 21 s left``, ``about 4 min left``, ``about 2.5 h left``."""
    if seconds < 1.5 * _MINUTE:
        return f"about {seconds:.0f} s left"
    if seconds < 1.5 * _HOUR:
        return f"about {seconds / _MINUTE:.0f} min left"
    return f"about {seconds / _HOUR:,.1f} h left"


def worker_hours(seconds: float) -> str:
    """Return text such as ``0.0250 h`` for worker-hours, which are few in a trial run and many in real searches."""
    return f"{round(seconds / _HOUR, 4) + 0.0:,.4f} h"  # + 0.0: not -0.0000


def busy_share(allocated: float, busy: float) -> str:
    """Return text such as ``96 % busy``: the busy part of allocated time. If more time was busy than allocated, other
    searches' workers did the rest."""
    share = round(100 * busy / allocated)
    return f"{share} % busy" if share <= 100 else "and others in addition"


def allocated_time(allocated: float, busy: float) -> str:
    """Return text such as ``1.5 min, 96 % busy``: allocated worker time, and the busy part of it."""
    return f"{duration(allocated)}, {busy_share(allocated, busy)}" if allocated else duration(allocated)


AT_FIRST = "it is read only when a trial begins"
"""Why a branch cannot change a hyperparameter."""


def changed_after(name: str, before: object, now: object, remedy: str = "give it one value") -> str:
    """Return the message ``the hyperparameter 'width' changes from 4 to 8, but is read only when a trial begins: give
    it one value``."""
    change = f"the hyperparameter {name!r} changes from {before!r} to {now!r}"
    return f"{change}, but is read only when a trial begins: {remedy}"


def size(bytes: float) -> str:
    """Return a size in a suitable unit: ``12 bytes``, ``1.2 MB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if bytes < 1000:
            return f"{bytes:.0f} {unit}" if unit == "bytes" else f"{bytes:.1f} {unit}"
        bytes /= 1000
    return f"{bytes:,.1f} TB"


def aligned(rows: Sequence[tuple[str, str]], *, width: int | None = None) -> str:
    """Return one line for each name and its value; values that are wider than ``width`` columns allow continue
    below."""
    names = max(len(name) for name, _ in rows)
    lines = []
    for name, value in rows:
        first, *others = _folded(value, None if width is None else width - names - 2)
        lines += [f"{name:<{names}}  {first}", *(f"{'':<{names}}  {other}" for other in others)]
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]], *, left: int = 1, width: int | None = None) -> str:
    """Return rows as a table: the first ``left`` columns are aligned to the left, the others to the right. All rows
    have the same number of cells; the first row has the columns' names.

    If the table is wider than ``width`` characters, these names are folded first; then the last columns move below
    their row, each with its name. Words are never cut.
    """
    header, *body = rows
    natural = [max(map(_columns, column)) for column in zip(*rows, strict=True)]
    if width is None or _with_gaps(natural) <= width:
        return _grid(rows, natural, left)
    words = [max(map(_columns, name.split()), default=0) for name in header]
    cells = [max(map(_columns, column)) for column in zip(*body, strict=True)] if body else words
    narrow = [max(pair) for pair in zip(words, cells, strict=True)]
    kept = next((count for count in range(len(header), 0, -1) if _with_gaps(narrow[:count]) <= width), 1)
    names = [_folded(name, its) for name, its in zip(header[:kept], narrow, strict=False)]
    deep = max(map(len, names))
    heading = [[name[i] if i < len(name) else "" for name in names] for i in range(deep)]
    grid = _grid([*heading, *(row[:kept] for row in body)], narrow[:kept], left).split("\n")
    lines = grid[:deep]
    for line, row in zip(grid[deep:], body, strict=True):
        first = _folded(line, width) if kept == 1 else [line]
        below = [f"{name} {cell}" for name, cell in zip(header[kept:], row[kept:], strict=True) if cell]
        lines += [*first, *(f"  {part}" for part in _packed(below, width - 2))]
    return "\n".join(lines)


def _grid(rows: Sequence[Sequence[str]], widths: Sequence[int], left: int) -> str:
    lines = []
    for row in rows:
        cells = []
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
            room = " " * (width - _columns(cell))
            cells.append(cell + room if place < left else room + cell)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _packed(items: Sequence[str], width: int) -> list[str]:
    """Return the items on as few lines of ``width`` columns as possible; wider items are folded."""
    lines: list[str] = []
    for item in items:
        if lines and _columns(lines[-1]) + 2 + _columns(item) <= width:
            lines[-1] += f"; {item}"
        else:
            lines += _folded(item, width)
    return lines


def folded(text: str, width: int | None) -> str:
    """Return a text on lines of at most ``width`` columns. Words are not cut, and existing line ends stay."""
    return "\n".join("\n".join(_folded(line, width)) for line in text.split("\n"))


def _with_gaps(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _folded(text: str, width: int | None) -> list[str]:
    """Return a text on lines of at most ``width`` columns; a wider word has a line of its own."""
    lines: list[str] = []
    for word in text.split(" ") if width is not None and _columns(text) > width else [text]:
        if lines and width is not None and _columns(lines[-1]) + 1 + _columns(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _columns(text: str) -> int:
    """Return the number of columns that a text takes on a terminal, where some characters take two."""
    from rich.cells import cell_len  # only when a table is shown, not whenever a number is written

    return cell_len(text)
