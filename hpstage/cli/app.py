"""The command line: ``hpstage COMMAND``."""

from __future__ import annotations

import io
import re
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hpstage.cli.audit import audit
from hpstage.cli.check import check
from hpstage.cli.copy import copy
from hpstage.cli.deploy import certificates, deploy
from hpstage.cli.export import export, report
from hpstage.cli.gc import gc
from hpstage.cli.logs import logs
from hpstage.cli.plan import plan
from hpstage.cli.run import run
from hpstage.cli.runs import runs
from hpstage.cli.status import status
from hpstage.cli.train import branch, train
from hpstage.cli.tree import tree
from hpstage.cluster import commands as cluster
from hpstage.errors import HpstageError, TrainingError, UsageError
from hpstage.errors.text import clean_lines
from hpstage.store.redaction import redacted
from hpstage.training.code.owner import is_users

_FIRST_LINE = "Traceback (most recent call last):"


def folded_traceback(error: BaseException) -> str:
    """Return the traceback of an error as text. It begins with the first frame of the user's code; if the user's code
    has no frame in it, it is complete."""
    shown = traceback.TracebackException.from_exception(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    before = next((at for at, frame in enumerate(frames) if is_users(frame.f_globals.get("__name__", ""))), 0)
    shown.stack = traceback.StackSummary.from_list(shown.stack[before:])
    chained, first, own = "".join(shown.format()).rpartition(_FIRST_LINE)
    folded = f"\n  ({before} frames of hpstage and of libraries are not shown)" if before else ""
    return f"{chained}{first}{folded}{own}"


app = typer.Typer(
    name="hpstage",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # otherwise [brackets] in help texts are taken for markup, and lost
)


class _Command(TyperCommand):
    """A command that refuses empty values. An empty path would mean the current folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        for param in self.params:
            if given.get(param.name or "") == "":
                name = param.opts[0] if param.param_type_name == "option" else str(param.name).upper()
                raise UsageError(f"{name} is empty; give a value")
        return super().parse_args(ctx, args)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"hpstage {version('hpstage')}")
        raise typer.Exit


@app.callback()
def hpstage(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hyperparameter search that never trains the same thing twice."""


STORES = (status, tree, report, logs, export, copy, gc)
for command in (run, train, branch, runs, plan, check, audit, *STORES):
    app.command(cls=_Command)(command)
app.command(cls=_Command, context_settings=cluster.PASSING)(cluster.scheduler)
app.command(cls=_Command, context_settings=cluster.PASSING, options_metavar="[OPTIONS] [SCHEDULER]")(cluster.worker)
app.command(cls=_Command)(deploy)
app.command(cls=_Command)(certificates)


# A call, or an argument in a text: without a value, with a number, or with True, which is no word of a command line.
_ARGUMENT = re.compile(
    r"\w\([^()]*\)"
    r"|(?P<with>with )?(?<![?&\w])(?P<name>\w+)=(?:True\b|(?P<value>(?=\d)))?(?=[\d\s,;:.)]|$)"
)
# Commands that import the user's code.
_IMPORTING = ("run", "train", "branch", "check", "plan", "audit")
# The class of typer's errors about the command line, which typer does not export.
_MISUSED = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _as_options(message: str, name: str) -> str:
    """Return an error of the Python API as one of the command ``name``, whose parameters have the names of the API's
    arguments: ``store=`` is ``--store``, or ``STORE`` where it is no option. Calls in the text remain."""
    commands: Any = typer.main.get_command(app)
    parameters = {parameter.name: parameter for parameter in commands.commands.get(name, commands).params}

    def option(found: re.Match[str]) -> str:
        parameter = parameters.get(found["name"])
        if parameter is None:
            return found[0]
        if parameter.param_type_name == "argument":
            return f"{'as ' if found['with'] else ''}{found['name'].upper()}"
        return f"{found['with'] or ''}{parameter.opts[0]}{'' if found['value'] is None else '='}"

    return _ARGUMENT.sub(option, message)


def _message(error: Exception, words: Sequence[str]) -> str:
    """Return the message of an error that is not hpstage's own."""
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.filename[:50] in " ".join(words):
        return f"hpstage: {error.filename}: {error.strerror}; give another\n"
    return folded_traceback(error)


def main() -> None:
    """Run a command. An error of hpstage is printed as one line on stderr, with exit status 1.

    Secrets in URLs of the command line are masked in errors.
    """
    words = sys.argv[1:]
    if words[:1] and words[0] in _IMPORTING:  # the user's code sees only the arguments after --
        mark = words.index("--") if "--" in words else len(words)
        words, sys.argv[1:] = words[:mark], words[mark + 1 :]
    # URLs are words of their own, or follow --option=.
    urls = [word for argument in words for word in (argument, argument.partition("=")[2]) if ":" in word]
    try:
        sys.exit(app(words, standalone_mode=False))
    except HpstageError as error:
        message, status = f"hpstage: {error}\n", 1
        if words[0] in ("train", "branch"):
            message = message.replace("(the space returns no hyperparameter", "(--set gives no hyperparameter")
        if not isinstance(error, TrainingError):  # which ends with code of the user
            message = _as_options(message, words[0])
    except typer.Abort:
        message, status = "Aborted!\n", 1
    except Exception as error:
        if isinstance(error, _MISUSED):
            page = io.StringIO()
            error.show(file=page)  # type: ignore[attr-defined]
            message, status = page.getvalue(), error.exit_code  # type: ignore[attr-defined]
        else:
            message, status = _message(error, words), 1
    typer.echo(clean_lines(redacted(message, *urls)), err=True, nl=False)
    sys.exit(status)
