"""Text for a terminal: names that users typed are shown, never obeyed."""

from __future__ import annotations

import sys

import typer


def echo(text: str) -> None:
    """Write to standard output; what its encoding has no signs for is escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    typer.echo(text.encode(encoding, "backslashreplace").decode(encoding))
