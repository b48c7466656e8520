"""A cluster under TLS, of the two commands: searched by whom it trusts, closed to others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from distributed import Client
from distributed.security import Security

import hpstage
from hpstage.algos import FullTraining
from hpstage.testing.toys import Tape, alone
from tests.dask.commands import free_port, workers
from tests.dask.conftest import Start, leave_loops, starting

trustme = pytest.importorskip("trustme", reason="makes the certificates")

STEPS = 6


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority (ca.pem), what it has certified (NAME.pem, NAME.key), and a stranger's."""
    folder = tmp_path_factory.mktemp("certificates")
    authority, another = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    for name, signer in (("scheduler", authority), ("worker", authority), ("client", authority), ("stranger", another)):
        certificate = signer.issue_cert("127.0.0.1")
        certificate.private_key_pem.write_to_path(folder / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(folder / f"{name}.pem")
    return folder


def options(certificates: Path, name: str) -> list[str]:
    files = {"ca-file": "ca.pem", "cert": f"{name}.pem", "key": f"{name}.key"}
    return [word for kind, file in files.items() for word in (f"--tls-{kind}", str(certificates / file))]


def security(certificates: Path, name: str) -> Security:
    return Security(
        tls_ca_file=str(certificates / "ca.pem"),
        tls_client_cert=str(certificates / f"{name}.pem"),
        tls_client_key=str(certificates / f"{name}.key"),
        require_encryption=True,
    )


@pytest.fixture(scope="module")
def address(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a scheduler with one worker."""
    host, port = "127.0.0.1", str(free_port())
    place = ["--host", host, "--port", port, "--no-dashboard"]
    address = f"tls://{host}:{port}"
    with starting(tmp_path_factory.mktemp("logs")) as start:
        scheduler = start("scheduler", *place, *options(certificates, "scheduler"))
        worker = start("worker", address, "--nworkers", "1", *options(certificates, "worker"))
        scheduler.says("Scheduler at:")
        yield address
        assert worker.stop() == 0
        assert scheduler.stop() == 0


def space(trial: optuna.Trial) -> dict[str, object]:
    return {"a": trial.suggest_int("a", 1, 3), "b": hpstage.schedule.multistep(1.0, milestones=[4])}


@pytest.mark.ci
def test_a_search_runs_under_tls_and_untrusted_clients_are_refused(
    address: str, certificates: Path, tmp_path: Path
) -> None:
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.GridSampler({"a": [1, 2, 3]}))
    with Client(address, security=security(certificates, "client"), set_as_default=False) as client:
        workers(client, 1)
        hpstage.optimize(
            study,
            Tape(),
            space,
            metric="hash",
            steps=STEPS,
            n_trials=3,
            algorithm=FullTraining(),
            executor=client,
            store=tmp_path / "store",
        )
    expected = {}
    for a in (1, 2, 3):
        schedules = {"a": hpstage.schedule.constant(a), "b": hpstage.schedule.multistep(1.0, milestones=[4])}
        expected[a] = alone(schedules, STEPS).evaluate()["hash"]
    assert {trial.params["a"]: trial.value for trial in study.trials} == expected

    with pytest.raises(OSError, match=r"(?i)certificate|tls|ssl"):
        Client(address, security=security(certificates, "stranger"), timeout="2s", set_as_default=False)
    with pytest.raises(TypeError, match="check your TLS configuration"):
        Client(address, timeout="2s", set_as_default=False)
    with pytest.raises((OSError, AssertionError)):  # Dask's own, when the connection closes while it shakes hands
        Client(address.replace("tls", "tcp"), timeout="2s", set_as_default=False)
    leave_loops()  # as Dask does where a client cannot connect


@pytest.mark.ci
def test_an_untrusted_worker_reports_the_tls_failure_and_does_not_join(
    address: str, certificates: Path, start: Start
) -> None:
    stranger = start("worker", address, "--nworkers", "1", *options(certificates, "stranger"))
    stranger.says(f"no scheduler at {address} (TLS fails: ")
    without = start("worker", address, "--nworkers", "1")
    without.says("check your TLS configuration")
    assert stranger.stop() == without.stop() == 0
    assert "Start worker at" not in stranger.said + without.said
