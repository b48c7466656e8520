"""Text for a terminal: it fits the terminal's width, and control characters in names that users typed are shown, not
obeyed."""

from __future__ import annotations

import io
import shutil
import sys

import typer
from rich.console import Console, RenderableType

from hpstage.errors.text import writable


def echo(text: str) -> None:
    """Write to standard output; escape the characters that its encoding lacks."""
    typer.echo(writable(text, _encoding()))


def columns() -> int | None:
    """Return the width that text has to fit; ``None`` where programs read it, or files keep it: nothing is folded."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def show(drawn: RenderableType) -> None:
    """Write to standard output, in colour where that is a terminal and ``NO_COLOR`` is not set."""
    captured = _Captured()
    Console(
        file=captured,
        width=columns() or _UNBOUNDED,
        force_terminal=sys.stdout.isatty(),
        force_jupyter=False,
        highlight=False,
    ).print(drawn, end="")
    echo("\n".join(line.rstrip() for line in captured.getvalue().rstrip("\n").split("\n")))


# Columns of a console that folds nothing.
_UNBOUNDED = 1_000_000


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


class _Captured(io.StringIO):
    """Captures text that is drawn with the characters that standard output can show."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return _encoding()
