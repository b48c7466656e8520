"""``hpstage deploy``: the files that run hpstage on clusters, which an installed package holds."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from typing import Annotated

import typer

from hpstage.cli.terminal import echo
from hpstage.errors import UsageError
from hpstage.errors.text import clean, table


def deploy(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The file to print.", show_default="list all files")
    ] = None,
) -> None:
    """Print a file that runs hpstage on a cluster. Fit it to yours: Compose, Kubernetes, Slurm, Grafana.

    The first lines of each file say how to use it. The Dockerfile builds the image that Compose and Kubernetes run,
    from the folder with hpstage's source. The container image of a search is based on it.

    Examples:

    \b
    hpstage deploy
    hpstage deploy slurm > slurm.sh
    """
    there = {file.name: file.read_text() for file in files("hpstage.cluster").joinpath("deploy").iterdir()}
    if name is None:
        echo(table([("file", "contents"), *((file, _title(text)) for file, text in sorted(there.items()))], left=2))
    elif found := [file for file in there if name in (file, file.rpartition(".")[0])]:
        sys.stdout.write(there[found[0]])
    else:
        raise UsageError(f"there is no file {clean(name)!r} to deploy; give one of {', '.join(sorted(there))}")


def _title(text: str) -> str:
    """Return the first sentence of a file: of its comments, or its description."""
    if text.startswith("{"):
        title: str = json.loads(text)["description"]
    else:
        title = next(line for line in text.splitlines() if line.startswith("# ")).removeprefix("# ")
    return title.rstrip(".")
