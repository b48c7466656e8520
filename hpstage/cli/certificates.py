"""``hpstage certificates``: the TLS certificate and key of a cluster."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from hpstage.cli.terminal import echo
from hpstage.errors import UsageError
from hpstage.report.files import refusing

_CERTIFICATE, _KEY = "certificate.pem", "key.pem"


def certificates(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder for the certificates, readable by you alone, on all hosts.")
    ],
) -> None:
    """Make a certificate and its key for a cluster. It prints the variables with which Dask uses them.

    Scheduler, workers and drivers that have these variables encrypt what they send, and refuse all that do not have the
    key; addresses then begin with tls://. A folder that has them keeps them, for a year: then remove it.

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
            for path, content in zip((key, certificate), made, strict=True):  # the certificate last: it stands for both
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
