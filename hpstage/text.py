"""How numbers, durations, sizes, names and tables are written for people. Pure."""

from __future__ import annotations

import io
from collections.abc import Sequence

_HOUR, _MINUTE = 3600, 60
# Columns of a console that wraps nothing.
_UNBOUNDED = 1_000_000


def clean(name: object) -> str:
    """A name with its control characters (escape sequences, line ends, changes of direction) as ``\\x1b``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(name))


def shortened(value: object, most: int = 80) -> str:
    """A value in at most so many characters; six digits of a float."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """In the unit that suits: ``20 ms``, ``1.5 s``, ``3.0 min``, ``2.25 h``."""
    if seconds == 0:
        return "0 s"
    if abs(seconds) < 1:
        return f"{1000 * seconds:.0f} ms"
    if abs(seconds) < 2 * _MINUTE:
        return f"{seconds:.1f} s"
    if abs(seconds) < 2 * _HOUR:
        return f"{seconds / _MINUTE:.1f} min"
    return f"{seconds / _HOUR:,.2f} h"


def clock(seconds: float) -> str:
    """``h:mm:ss``, rounded."""
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes // 60:,}:{minutes % 60:02d}:{left:02d}"


def hours(seconds: float) -> str:
    """``0.0250``: worker-hours, which are few in a trial run and many in earnest."""
    return f"{round(seconds / _HOUR, 4) + 0.0:,.4f}"  # + 0.0: not -0.0000


def worker_hours(seconds: float) -> str:
    return f"{hours(seconds)} h"


def paid_hours(paid: float, used: float) -> str:
    """``0.0250 h, 96 % used``: worker-hours present, and the part of them in which something was done."""
    return f"{worker_hours(paid)}, {100 * used / paid:.0f} % used" if paid else worker_hours(paid)


def size(bytes: float) -> str:
    """In the unit that suits: ``12 bytes``, ``1.2 MB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if bytes < 1000:
            return f"{bytes:.0f} {unit}" if unit == "bytes" else f"{bytes:.1f} {unit}"
        bytes /= 1000
    return f"{bytes:,.1f} TB"


def aligned(rows: Sequence[tuple[str, str]]) -> str:
    """One line for each name and its value."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Rows of as many cells each, the first ``left`` columns to the left, the others to the right; never wrapped."""
    # Where a table is shown, not wherever a number is written.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for place in range(len(rows[0])):
        grid.add_column(justify="left" if place < left else "right", no_wrap=True)
    for row in rows:
        grid.add_row(*map(Text, row))  # as it is: names are no markup
    shown = io.StringIO()
    Console(file=shown, width=_UNBOUNDED, color_system=None, force_jupyter=False).print(grid)
    return "\n".join(line.rstrip() for line in shown.getvalue().rstrip("\n").split("\n"))
