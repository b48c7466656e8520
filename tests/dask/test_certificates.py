"""``hpstage certificates``: who has them belongs to the cluster, and nobody else does."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from distributed import Client
from distributed.security import Security
from typer.testing import CliRunner

from hpstage.cli.app import app
from tests.dask.commands import Command, free_port
from tests.dask.conftest import Start, leave_loops, starting

pytest.importorskip("cryptography", reason="pip install hpstage[tls]")


def variables(folder: Path) -> dict[str, str]:
    """What the command prints for a shell."""
    done = CliRunner().invoke(app, ["certificates", str(folder)])
    assert done.exit_code == 0, done.output
    lines = [shlex.split(line) for line in done.output.splitlines()]
    assert {words[0] for words in lines} == {"export"}
    return dict(words[1].split("=", 1) for words in lines)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    logs = tmp_path / "logs"
    logs.mkdir()
    with starting(logs) as start:
        yield start


def test_certificates_are_readable_only_by_the_owner_and_kept_by_a_second_call(tmp_path: Path) -> None:
    folder = tmp_path / "it's mine"
    found = variables(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == ["certificate.pem", "key.pem"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    before = [path.read_bytes() for path in sorted(folder.iterdir())]
    assert variables(folder) == found
    assert [path.read_bytes() for path in sorted(folder.iterdir())] == before
    variables(tmp_path / "another")
    assert (tmp_path / "another" / "key.pem").read_bytes() not in before


def test_a_certificates_folder_that_cannot_be_written_raises_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["certificates", str(tmp_path / "file" / "folder")])
    assert done.exit_code != 0
    assert "give another folder" in str(done.exception)


@pytest.mark.ci
def test_only_clients_with_the_clusters_certificates_can_connect(start: Start, tmp_path: Path) -> None:
    ours, _ = variables(tmp_path / "ours"), variables(tmp_path / "others")
    port = free_port()
    address = f"tls://127.0.0.1:{port}"
    words = "--host", "0.0.0.0", "--port", str(port), "--dashboard-address", "127.0.0.1:0"
    scheduler: Command = start("scheduler", *words, **ours)
    worker = start("worker", address, "--gpus", "0", "--nworkers", "1", **ours)
    with client_of(address, tmp_path / "ours", 120) as client:
        client.wait_for_workers(1, timeout=120)
        assert client.submit(pow, 2, 5).result(timeout=60) == 32
    with pytest.raises(OSError, match=r"(?i)tls|ssl|certificate|timed out"):
        client_of(address, tmp_path / "others", 3)
    with pytest.raises(OSError, match=r"(?i)timed out|closed|handshake"):
        Client(address.replace("tls", "tcp"), security=Security(), timeout=3, set_as_default=False)
    leave_loops()  # those of Dask's clients without a scheduler
    assert "no TLS" not in scheduler.said
    assert worker.stop() == 0
    scheduler.stop()


def client_of(address: str, folder: Path, seconds: float) -> Client:
    certificate, key = str(folder / "certificate.pem"), str(folder / "key.pem")
    security = Security(
        require_encryption=True, tls_ca_file=certificate, tls_client_cert=certificate, tls_client_key=key
    )
    return Client(address, security=security, timeout=seconds, set_as_default=False)


@pytest.mark.ci
def test_a_public_scheduler_without_certificates_warns_once_that_anybody_can_run_code(start: Start) -> None:
    words = "scheduler", "--port", str(free_port()), "--dashboard-address", "127.0.0.1:0"
    scheduler = start(*words, "--host", "0.0.0.0")
    scheduler.says("Scheduler at")
    scheduler.stop()
    assert scheduler.said.count("anybody who can reach this scheduler can run code on its workers") == 1
    own = start(*words, "--host", "127.0.0.1")
    own.says("Scheduler at")
    own.stop()
    assert "no TLS" not in own.said
    assert os.environ.get("DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION") is None
