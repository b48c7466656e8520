"""The command line: ``hpstage COMMAND``."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from hpstage.cluster import commands as cluster
from hpstage.commands.check import check
from hpstage.commands.export import export
from hpstage.commands.gc import gc
from hpstage.commands.plan import plan
from hpstage.commands.report import report
from hpstage.commands.run import run
from hpstage.commands.status import status
from hpstage.commands.tree import tree
from hpstage.errors import HpstageError

app = typer.Typer(
    name="hpstage",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,  # else [brackets] in help texts are markup, and lost
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"hpstage {version('hpstage')}")
        raise typer.Exit


@app.callback()
def hpstage(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """Hyper-parameter search that never trains the same thing twice."""


app.command(context_settings=cluster.PASSING)(cluster.scheduler)
app.command(context_settings=cluster.PASSING, options_metavar="[OPTIONS] [SCHEDULER]")(cluster.worker)
app.command()(check)
app.command()(gc)
app.command()(plan)
app.command()(run)
app.command()(status)
app.command()(tree)
app.command()(report)
app.command()(export)


def main() -> None:
    """Run a command. What hpstage refuses is told in one line on stderr, with exit status 1."""
    try:
        app()
    except HpstageError as error:
        typer.echo(f"hpstage: {error}", err=True)
        sys.exit(1)
