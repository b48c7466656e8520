"""The commands ``hpstage scheduler`` and ``hpstage worker``: those of Dask, configured for training and supervised."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hpstage.errors import UsageError

PASSING = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings of a command that passes further arguments to Dask."""

_PORT = 8786
_PAGE = "hpstage.cluster.dashboard"
_REASONS = 3
"""Maximum number of reasons for a missing scheduler that are printed: on a busy host, the first may be a timeout."""
_OWN = ("127.0.0.1", "::1", "localhost")
"""Hosts that only accounts of this machine reach."""
_LOOK = 1.0
"""Seconds between two attempts to reach a scheduler."""
_TRYING = 3.0
"""Maximum seconds of an attempt, all of which pass if nothing listens there."""

Text = str | None
Texts = list[str] | None
Host = Annotated[Text, typer.Option(metavar="HOST", help="Address or name under which the others reach this host.")]
Interface = Annotated[Text, typer.Option(metavar="NAME", help="Network interface to use, like eth0 or ib0.")]
SchedulerFile = Annotated[
    Text,
    typer.Option(metavar="FILE", help="Where the scheduler writes its address, on a disk that all hosts share."),
]
Authority = Annotated[
    Text, typer.Option(metavar="FILE", help="PEM file of the authority that signed the certificates.")
]
Certificate = Annotated[Text, typer.Option(metavar="FILE", help="PEM file of this process's certificate.")]
Key = Annotated[Text, typer.Option(metavar="FILE", help="PEM file of the certificate's private key.")]
Preload = Annotated[Texts, typer.Option(metavar="MODULE", help="Module or file to load first. May be repeated.")]


def scheduler(
    context: typer.Context,
    host: Host = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help=f"Port to listen on.  [default: {_PORT}]")] = None,
    interface: Interface = None,
    scheduler_file: SchedulerFile = None,
    dashboard_address: Annotated[
        Text, typer.Option(metavar="HOST:PORT", help="Where to serve the dashboard.  [default: :8787]")
    ] = None,
    tls_ca_file: Authority = None,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    preload: Preload = None,
) -> None:
    """Run a Dask scheduler for training.

    This is `dask scheduler`, with all its options, but detects frozen workers after 60 s.

    \b
    hpstage scheduler
    hpstage scheduler --port 8786 --dashboard-address :8787
    hpstage scheduler --scheduler-file /shared/scheduler.json
    hpstage scheduler --tls-ca-file ca.pem --tls-cert scheduler.pem --tls-key scheduler.key
    """
    import dask.config
    from distributed.cli import dask_scheduler

    from hpstage.cluster.settings import scheduler_environment

    options = {
        "--host": host,
        "--port": port,
        "--interface": interface,
        "--scheduler-file": scheduler_file,
        "--dashboard-address": dashboard_address,
        "--tls-ca-file": tls_ca_file,
        "--tls-cert": tls_cert,
        "--tls-key": tls_key,
        # Modules on the command line replace those of the configuration.
        "--preload": [*(preload or _listed(dask.config.get("distributed.scheduler.preload"))), _PAGE],
    }
    words = [*_words(options), *context.args]
    parsed = _parse(dask_scheduler.main, words)
    _check_host(parsed["host"])
    if not _is_encrypted(parsed) and parsed["host"] not in _OWN:
        _log("no TLS: whoever reaches this scheduler can run code on its workers; see hpstage certificates --help")
    sys.stderr.flush()
    module = [sys.executable, "-m", "distributed.cli.dask_scheduler"]
    os.execve(sys.executable, [*module, *words], scheduler_environment())


def worker(
    context: typer.Context,
    nworkers: Annotated[
        int | None, typer.Option(min=1, help="How many processes.  [default: one per GPU, else one per core]")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="How many GPUs to use; 0 hides them.  [default: all]")] = None,
    workers_per_gpu: Annotated[
        int | None, typer.Option(min=1, help="How many processes share each GPU, in place of --nworkers.")
    ] = None,
    gpus_per_worker: Annotated[
        int, typer.Option(min=1, help="How many GPUs each process sees, for a trainable with devices_per_stage.")
    ] = 1,
    host: Host = None,
    interface: Interface = None,
    name: Annotated[
        Text, typer.Option(metavar="NAME", help="What to call the worker; several are called NAME-0, NAME-1, ...")
    ] = None,
    scheduler_file: SchedulerFile = None,
    local_directory: Annotated[Text, typer.Option(metavar="FOLDER", help="Where to put temporary files.")] = None,
    tls_ca_file: Authority = None,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    preload: Preload = None,
) -> None:
    """Run this host's workers: a process per GPU, else per core.

    They wait for the scheduler, and are restarted when they or the scheduler die. SIGTERM or Ctrl-C ends them
    gracefully, a second one immediately. All further options are those of `dask worker`.

    \b
    hpstage worker tcp://head:8786
    hpstage worker tcp://head:8786 --nworkers 4 --name rack2
    hpstage worker tcp://head:8786 --workers-per-gpu 4
    hpstage worker --scheduler-file /shared/scheduler.json
    hpstage worker tls://head:8786 --tls-ca-file ca.pem --tls-cert worker.pem --tls-key worker.key
    """
    from distributed.cli import dask_worker

    from hpstage.cluster.devices import (
        environment_of,
        first_devices,
        grouped,
        has_other_accelerator,
        how_many,
        visible_devices,
    )
    from hpstage.cluster.settings import worker_environment
    from hpstage.cluster.supervision import Child, Supervisor

    options = {
        "--host": host,
        "--interface": interface,
        "--scheduler-file": scheduler_file,
        "--local-directory": local_directory,
        "--tls-ca-file": tls_ca_file,
        "--tls-cert": tls_cert,
        "--tls-key": tls_key,
        "--preload": preload,
    }
    ours = ["--no-nanny", "--nthreads", "1", "--memory-limit", "0", "--no-dashboard"]
    theirs = [*_words(options), *context.args]
    parsed = _parse(dask_worker.main, theirs)
    _check_host(parsed["host"])
    place = _Place(parsed)
    words = [*ours, *theirs, "--preload", "hpstage.cluster.supervised_worker"]
    devices = [] if gpus == 0 else grouped(first_devices(visible_devices(), gpus), gpus_per_worker)
    elsewhere = not devices and gpus != 0 and has_other_accelerator()
    count = how_many(nworkers, workers_per_gpu, devices, accelerator=elsewhere)
    command = (sys.executable, "-m", "hpstage.cluster.supervised_worker", str(os.getpid()), *words)
    names = [] if name is None else [name] if count == 1 else [f"{name}-{number}" for number in range(count)]
    children = [
        Child(
            f"worker {number}",
            (*command, "--name", names[number]) if names else command,
            {**worker_environment(), **environment_of(number, devices, hide=gpus == 0, workers=count)},
        )
        for number in range(count)
    ]
    _log(f"{count} {'worker' if count == 1 else 'workers'} for {place}, on {_on(devices, count)}")
    supervisor = Supervisor(children, ready=place.wait_for_scheduler, log=_log)
    raise typer.Exit(asyncio.run(supervisor.run()))


def _check_host(host: str | None) -> None:
    """Raise :class:`UsageError` if nothing can listen at the value of ``--host``: an address, a name or a URL."""
    from distributed.comm.addressing import parse_address, parse_host_port

    if not host:
        return
    try:
        where = parse_address(host)[1]
        if where.count(":") < 2 or "[" in where:  # no bare address of IPv6
            where, _ = parse_host_port(where, 0)
        family, kind, protocol, _, address = socket.getaddrinfo(where, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trying:
            trying.bind(address)
    except (OSError, ValueError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--host {host} is no address of this host ({reason}); give one, or leave it out") from None


def _is_encrypted(options: Mapping[str, Any]) -> bool:
    """Whether the parsed options of ``dask scheduler``, or the configuration, request TLS."""
    from distributed.security import Security

    return options["tls_ca_file"] is not None or bool(Security().require_encryption)


class _Place:
    """The scheduler's location, given by the parsed options of ``dask worker``."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import dask.config
        from distributed.core import coerce_to_address
        from distributed.security import Security

        self._file: str | None = options["scheduler_file"]
        address: str | None = options["scheduler"] or dask.config.get("scheduler-address", None)
        if self._file is None and address is None:
            raise UsageError("which scheduler? Give its address, as in `hpstage worker tcp://host:8786`, or a file")
        self._address = None if address is None else str(coerce_to_address(address))
        certificates = {
            "tls_ca_file": options["tls_ca_file"],
            "tls_worker_cert": options["tls_cert"],
            "tls_worker_key": options["tls_key"],
        }
        security = Security(**{name: file for name, file in certificates.items() if file is not None})
        if self._file is None and security.require_encryption and not str(self._address).startswith("tls://"):
            raise UsageError(f"with certificates, give the address as tls://host:8786, not {self._address}")
        self._connecting: dict[str, Any] = security.get_connection_args("worker")

    def __str__(self) -> str:
        return self._file or str(self._address)

    async def wait_for_scheduler(self) -> None:
        """Wait until a connection can be made; print the first few distinct reasons why there is none yet.

        A worker would also retry, but ten times a second, logging a line each time and never the reason.
        """
        logged: set[str] = set()
        while (problem := await self._problem()) is not None:
            if problem not in logged and len(logged) < _REASONS:
                _log(f"no scheduler at {self} ({problem}); looking for it until it is there")
                logged.add(problem)
            await asyncio.sleep(_LOOK)

    async def _problem(self) -> str | None:
        from distributed.comm import connect

        address = self._address
        if self._file is not None:
            try:
                address = json.loads(Path(self._file).read_text())["address"]
            except (OSError, ValueError) as error:  # ValueError: half written
                return str(error)
        try:
            comm = await connect(address, timeout=_TRYING, **self._connecting)
        except (OSError, TypeError) as error:  # TypeError: TLS without certificates
            return _innermost(error)
        except ValueError as error:
            raise UsageError(f"{address} is no address: {error}") from None
        await comm.close()
        return None


def _innermost(error: BaseException) -> str:
    # Whether Dask sets a cause depends on when the other side hangs up; Tornado's own error is in ``real_error``.
    while inner := error.__cause__ or getattr(error, "real_error", None) or error.__context__:
        error = inner
    refused = isinstance(error, ssl.SSLError)
    # A TimeoutError has no text.
    return f"TLS fails, and the scheduler's log has the reason: {error}" if refused else str(error) or "no answer"


def _listed(words: str | list[str]) -> list[str]:
    return [words] if isinstance(words, str) else words


def _words(options: Mapping[str, object]) -> list[str]:
    """Return the command-line arguments that set these options."""
    words = []
    for option, value in options.items():
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            words += [option, str(one)]
    return words


def _parse(command: Any, words: Sequence[str]) -> dict[str, Any]:
    """Parse Dask's parameters with its own parser.

    Raises:
        UsageError: it rejects an argument.
    """
    import click

    try:
        parameters: dict[str, Any] = command.make_context("hpstage", list(words)).params
    except click.exceptions.Exit as done:  # --version
        raise typer.Exit(done.exit_code) from None
    except click.ClickException as error:
        raise UsageError(f"`{' '.join(words)}`: {error.format_message()}") from None
    except Exception as error:  # of a module that --preload names
        raise UsageError(f"`{' '.join(words)}`: {type(error).__name__}: {error}") from error
    return parameters


def _on(devices: Sequence[str], count: int) -> str:
    if not devices:
        return "the CPU"
    shared = f" (up to {-(-count // len(devices))} each)" if count > len(devices) else ""
    return "GPU " + ", ".join(devices[:count]) + shared


def _log(line: str) -> None:
    typer.echo(f"hpstage: {line}", err=True)
