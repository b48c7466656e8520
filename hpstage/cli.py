"""The command line: ``hpstage COMMAND``."""

from __future__ import annotations

import sys

import typer

from hpstage.commands.gc import gc
from hpstage.errors import HpstageError

app = typer.Typer(
    name="hpstage",
    help="Hyper-parameter search that never trains the same thing twice.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(gc)


@app.callback()
def _commands() -> None:
    """Without this, typer takes a command that is alone for the program itself."""


def main() -> None:
    """Run a command. What hpstage refuses is told in one line on stderr, with exit status 1."""
    try:
        app()
    except HpstageError as error:
        typer.echo(f"hpstage: {error}", err=True)
        sys.exit(1)
