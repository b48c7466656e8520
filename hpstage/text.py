"""How numbers, durations, sizes and names are written for people. Pure."""

from __future__ import annotations

_HOUR, _MINUTE = 3600, 60


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


def size(bytes: float) -> str:
    """In the unit that suits: ``12 bytes``, ``1.2 MB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if bytes < 1000:
            return f"{bytes:.0f} {unit}" if unit == "bytes" else f"{bytes:.1f} {unit}"
        bytes /= 1000
    return f"{bytes:,.1f} TB"
