"""Text for a terminal: names that users typed are shown, never obeyed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer


def clean(name: object) -> str:
    """A name with its control characters (escape sequences, line ends, changes of direction) as ``\\x1b``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(name))


def echo(text: str) -> None:
    """Write to standard output; what its encoding has no signs for is escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    typer.echo(text.encode(encoding, "backslashreplace").decode(encoding))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Lines of aligned columns: the first ``left`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if i < left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]


def hours(seconds: float) -> str:
    return f"{round(seconds / 3600, 4) + 0.0:.4f}"  # + 0.0: not -0.0000


def count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
