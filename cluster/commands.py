"""The commands ``hpstage scheduler`` and ``hpstage worker``: Dask's commands, configured for training."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
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
"""Addresses that only accounts of this machine can reach."""
_LOOK = 1.0
"""Seconds between two attempts to reach a scheduler."""
_TRYING = 3.0
"""Maximum seconds of an attempt. If nothing listens at the address, an attempt takes this long."""


def scheduler(
    context: typer.Context,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help=f"Port to listen on.  [default: {_PORT}]")] = None,
) -> None:
    """Run a Dask scheduler for training.

    This is `dask scheduler` with the hpstage page and metrics; it detects frozen workers after 60 s. It takes all
    options of `dask scheduler`, such as --host HOST, --interface NAME, --scheduler-file FILE, --dashboard-address
    HOST:PORT, --preload MODULE, and for TLS --tls-ca-file, --tls-cert and --tls-key.

    \b
    hpstage scheduler
    hpstage scheduler --port 8786 --dashboard-address :8787
    hpstage scheduler --scheduler-file /shared/scheduler.json
    hpstage scheduler --tls-ca-file ca.pem --tls-cert scheduler.pem --tls-key scheduler.key
    """
    import dask.config
    from distributed.cli import dask_scheduler
    from distributed.security import Security

    from hpstage.cluster.settings import scheduler_environment

    words = [*(() if port is None else ("--port", str(port))), *context.args]
    modules = [_PAGE]
    if not any(word.partition("=")[0] == "--preload" for word in words):  # --preload replaces the configured modules
        configured = dask.config.get("distributed.scheduler.preload")
        modules = [*([configured] if isinstance(configured, str) else configured), _PAGE]
    for module in modules:
        words += ["--preload", module]
    parsed = _parse(dask_scheduler.main, words)
    _check_host(parsed["host"])
    encrypted = parsed["tls_ca_file"] is not None or Security().require_encryption
    if not encrypted and parsed["host"] not in _OWN:
        _log(
            "no TLS: anybody who can reach this scheduler can run code on its workers; see hpstage certificates --help"
        )
    sys.stderr.flush()
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", *words]
    os.execve(sys.executable, command, scheduler_environment())


def worker(
    context: typer.Context,
    nworkers: Annotated[
        int | None, typer.Option(min=1, help="Number of workers.  [default: one per GPU, else one per core]")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="Number of GPUs to use; 0 hides all GPUs.  [default: all]")
    ] = None,
    workers_per_gpu: Annotated[
        int | None, typer.Option(min=1, help="Number of workers that share each GPU; replaces --nworkers.")
    ] = None,
    gpus_per_worker: Annotated[
        int, typer.Option(min=1, help="Number of GPUs that each worker sees, for a trainable with devices_per_stage.")
    ] = 1,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the worker; several workers are named NAME-0, NAME-1, ..."),
    ] = None,
) -> None:
    """Run this host's workers: a process per GPU, else per core.

    Workers wait for the scheduler, and are restarted when they or the scheduler die. SIGTERM or Ctrl-C ends them
    gracefully, a second one immediately. All other options are passed to `dask worker`, such as --host HOST,
    --interface NAME, --scheduler-file FILE, --local-directory FOLDER, --preload MODULE, and for TLS --tls-ca-file,
    --tls-cert and --tls-key.

    \b
    hpstage worker tcp://head:8786
    hpstage worker tcp://head:8786 --nworkers 4 --name rack2
    hpstage worker tcp://head:8786 --workers-per-gpu 4
    hpstage worker --scheduler-file /shared/scheduler.json
    hpstage worker tls://head:8786 --tls-ca-file ca.pem --tls-cert worker.pem --tls-key worker.key
    """
    from distributed.cli import dask_worker

    from hpstage.cluster.devices import assigned, environment_of
    from hpstage.cluster.settings import worker_environment
    from hpstage.cluster.supervision import Child, Supervisor

    ours = ["--no-nanny", "--nthreads", "1", "--memory-limit", "0", "--no-dashboard"]
    parsed = _parse(dask_worker.main, context.args)
    _check_host(parsed["host"])
    place = _Place(parsed)
    words = [*ours, *context.args, "--preload", "hpstage.cluster.supervised_worker"]
    devices, count = assigned(nworkers, gpus, workers_per_gpu, gpus_per_worker)
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
        if where.count(":") < 2 or "[" in where:  # not an IPv6 address without brackets
            where, _ = parse_host_port(where, 0)
        family, kind, protocol, _, address = socket.getaddrinfo(where, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trying:
            trying.bind(address)
    except (OSError, ValueError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--host {host} is not an address of this host ({reason}); give one, or leave it out"
        ) from None


class _Place:
    """The scheduler's location, given by the parsed options of ``dask worker``."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import dask.config
        from distributed.core import coerce_to_address
        from distributed.security import Security

        self._file: str | None = options["scheduler_file"]
        address: str | None = options["scheduler"] or dask.config.get("scheduler-address", None)
        if self._file is None and address is None:
            raise UsageError(
                "SCHEDULER is missing; give its address, as in `hpstage worker tcp://host:8786`, or --scheduler-file"
            )
        self._address = None if address is None else str(coerce_to_address(address))
        certificates = {
            "tls_ca_file": options["tls_ca_file"],
            "tls_worker_cert": options["tls_cert"],
            "tls_worker_key": options["tls_key"],
        }
        security = Security(**{name: file for name, file in certificates.items() if file is not None})
        if self._file is None and security.require_encryption and not str(self._address).startswith("tls://"):
            raise UsageError(f"the address is {self._address}; with certificates, give it as tls://host:8786")
        self._connecting: dict[str, Any] = security.get_connection_args("worker")

    def __str__(self) -> str:
        return self._file or str(self._address)

    async def wait_for_scheduler(self) -> None:
        """Wait until a connection can be made. Print the first few different reasons why it cannot.

        A worker would retry by itself, but ten times a second, with a log line each time and without the reason.
        """
        logged: set[str] = set()
        while (problem := await self._problem()) is not None:
            if problem not in logged and len(logged) < _REASONS:
                _log(f"no scheduler at {self} ({problem}); waiting for it")
                logged.add(problem)
            await asyncio.sleep(_LOOK)

    async def _problem(self) -> str | None:
        from distributed.comm import connect

        address = self._address
        if self._file is not None:
            try:
                address = json.loads(Path(self._file).read_text())["address"]
            except (OSError, ValueError) as error:  # ValueError: the file is not complete yet
                return str(error)
        try:
            comm = await connect(address, timeout=_TRYING, **self._connecting)
        except (OSError, TypeError) as error:  # TypeError: TLS without certificates
            return _innermost(error)
        except ValueError as error:
            raise UsageError(f"{address} is not an address: {error}") from None
        await comm.close()
        return None


def _innermost(error: BaseException) -> str:
    # Whether Dask sets a cause depends on when the other side closes; Tornado's own error is in ``real_error``.
    while inner := error.__cause__ or getattr(error, "real_error", None) or error.__context__:
        error = inner
    refused = isinstance(error, ssl.SSLError)
    # A TimeoutError has no text.
    return f"TLS fails: {error}; the scheduler's log has the reason" if refused else str(error) or "no answer"


def _parse(command: Any, words: Sequence[str]) -> dict[str, Any]:
    """Parse Dask's parameters with its own parser.

    Raises:
        UsageError: the parser rejects an argument, or an argument is empty.
    """
    import click

    for before, word in pairwise(["", *words]):
        if word == "" or (word.startswith("--") and word.endswith("=")):
            option = word.removesuffix("=") or (before if before.startswith("--") else "SCHEDULER")
            raise UsageError(f"{option} is empty; give a value")

    try:
        parameters: dict[str, Any] = command.make_context("hpstage", list(words)).params
    except click.exceptions.Exit as done:  # --version
        raise typer.Exit(done.exit_code) from None
    except click.ClickException as error:
        raise UsageError(f"`{' '.join(words)}`: {error.format_message()}") from None
    except Exception as error:  # raised by a module of --preload
        raise UsageError(f"`{' '.join(words)}`: {type(error).__name__}: {error}") from error
    return parameters


def _on(devices: Sequence[str], count: int) -> str:
    if not devices:
        return "the CPU"
    shared = f" (up to {-(-count // len(devices))} each)" if count > len(devices) else ""
    return "GPU " + ", ".join(devices[:count]) + shared


def _log(line: str) -> None:
    typer.echo(f"hpstage: {line}", err=True)
