"""Print text to a terminal: it fits the width, and characters that the terminal cannot encode are escaped."""

from __future__ import annotations

import io
import shutil
import sys

import typer
from rich.console import Console, RenderableType

from hpstage.errors.text import writable


def echo(text: str) -> None:
    """Write to standard output. Characters that its encoding lacks are escaped."""
    typer.echo(writable(text, _encoding()))


def columns() -> int | None:
    """Return the width of the terminal; ``None`` if standard output is a pipe or a file, where nothing is folded."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def show(drawn: RenderableType) -> None:
    """Write to standard output, in colour if it is a terminal and ``NO_COLOR`` is not set."""
    captured = _Captured()
    Console(
        file=captured,
        width=columns() or _UNBOUNDED,
        force_terminal=sys.stdout.isatty(),
        force_jupyter=False,
        highlight=False,
    ).print(drawn, end="")
    echo("\n".join(line.rstrip() for line in captured.getvalue().rstrip("\n").split("\n")))


# Width of a console that folds nothing.
_UNBOUNDED = 1_000_000


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


class _Captured(io.StringIO):
    """Captures text. It claims the encoding of standard output, so that rich draws only characters that it has."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return _encoding()
