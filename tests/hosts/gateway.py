"""dask-gateway on this host: its real server and proxy in a folder, whose clusters are processes of this account."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from tests.dask.commands import free_port
from tests.dask.processes import ROOT, until

_CONFIGURATION = """\
c.DaskGateway.backend_class = "dask_gateway_server.backends.local.UnsafeLocalBackend"
c.DaskGateway.address = "127.0.0.1:{ports[0]}"
c.Proxy.address = "127.0.0.1:{ports[1]}"
c.LocalBackend.clusters_directory = {clusters!r}
c.LocalBackend.sigint_timeout = 60
c.ClusterConfig.scheduler_cmd = {scheduler!r}
c.ClusterConfig.worker_cmd = {worker!r}
c.ClusterConfig.environment = {{"PYTHONPATH": {root!r}}}
"""


def missing() -> str:
    """Why there is no dask-gateway here; empty if it can be started."""
    absent = [name for name in ("dask_gateway", "dask_gateway_server") if importlib.util.find_spec(name) is None]
    return f"pip install {absent[0].replace('_', '-')}" if absent else ""


@contextmanager
def gateway(folder: Path, worker: Sequence[str]) -> Iterator[str]:
    """Start the server; yield its address. ``worker``: the module and words that start one."""
    ports = free_port(), free_port()
    (folder / "clusters").mkdir(parents=True)
    (folder / "config.py").write_text(
        _CONFIGURATION.format(
            ports=ports,
            clusters=str(folder / "clusters"),
            scheduler=[sys.executable, "-m", "distributed.cli.dask_scheduler"],
            worker=[sys.executable, "-m", *worker],
            root=str(ROOT),
        )
    )
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "dask_gateway_server", "-f", "config.py"],
            cwd=folder, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{ports[1]}"
        until(lambda: _answers(address) or server.poll() is not None, "the server answers through its proxy")
        assert server.poll() is None, log.read_text()
        yield address
    finally:
        server.terminate()
        server.wait(60)


def _answers(address: str) -> bool:
    try:
        with urlopen(f"{address}/api/health") as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
