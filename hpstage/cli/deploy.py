"""``hpstage deploy`` and ``certificates``: files that run hpstage on clusters, and a cluster's TLS certificate."""

from __future__ import annotations

import json
import os
import shlex
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from hpstage.cli.terminal import echo
from hpstage.errors import UsageError
from hpstage.errors.text import clean, table
from hpstage.report.files import refusing


def deploy(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The file to print.", show_default="list all files")
    ] = None,
) -> None:
    """Print a file for Compose, Kubernetes, Slurm or Grafana. Adapt it to your cluster.

    The first lines of each file explain its use. The Dockerfile builds the image that Compose and Kubernetes run, from
    the folder with hpstage's source. Base the image of your search on it.

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
        raise UsageError(f"there is no deployment file {clean(name)!r}; give one of {', '.join(sorted(there))}")


def _title(text: str) -> str:
    """Return the title of a file: its first comment, or its description in JSON."""
    if text.startswith("{"):
        title: str = json.loads(text)["description"]
    else:
        title = next(line for line in text.splitlines() if line.startswith("# ")).removeprefix("# ")
    return title.rstrip(".")


_CERTIFICATE, _KEY = "certificate.pem", "key.pem"


def certificates(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="Folder for the certificate, readable only by you, with the same path on all hosts.",
        ),
    ],
) -> None:
    """Make a certificate and its key for a cluster. It prints the environment variables with which Dask uses them.

    Schedulers, workers and drivers that have these variables encrypt all connections and accept only those that have
    the key; addresses then begin with tls://. An existing certificate in the folder is not replaced. It is valid for a
    year; after that, remove the folder and run the command again.

    Examples:

    \b
    hpstage certificates ~/.hpstage-tls
    eval "$(hpstage certificates ~/.hpstage-tls)"
    hpstage scheduler
    hpstage worker tls://head:8786
    """
    certificate, key = (folder.absolute() / name for name in (_CERTIFICATE, _KEY))
    with refusing(folder, another="folder"):
        if not certificate.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = _made()
            for path, content in zip((key, certificate), made, strict=True):  # certificate last: if it exists, both do
                aside = path.with_suffix(f".{os.getpid()}")
                with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    file.write(content)
                aside.replace(path)
    variables = {"REQUIRE_ENCRYPTION": "True", "TLS__CA_FILE": str(certificate)}
    for role in ("SCHEDULER", "WORKER", "CLIENT"):
        variables |= {f"TLS__{role}__CERT": str(certificate), f"TLS__{role}__KEY": str(key)}
    for name, value in variables.items():
        echo(f"export DASK_DISTRIBUTED__COMM__{name}={shlex.quote(value)}")


def _made() -> tuple[str, str]:
    """Return a new key and its certificate, which is its own authority."""
    from distributed.security import Security

    try:
        made = Security.temporary()
    except ImportError:
        raise UsageError('certificates need the package cryptography: pip install "hpstage[tls]"') from None
    return made.tls_scheduler_key, made.tls_scheduler_cert
