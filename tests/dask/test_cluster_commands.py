"""``hpstage scheduler`` and ``hpstage worker``, as processes: what they set, what they survive, how they end."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import dask.config
import distributed
import pytest
from distributed import Client
from distributed.comm.tcp import convert_stream_closed_error
from tornado.iostream import StreamClosedError
from typer.testing import CliRunner

from hpstage.checkpoints import host_memory
from hpstage.cli.app import app
from hpstage.cluster.commands import _innermost
from hpstage.cluster.devices import (
    environment_of,
    first_devices,
    grouped,
    has_other_accelerator,
    how_many,
    identities,
    visible_devices,
)
from hpstage.cluster.settings import scheduler_environment, worker_environment
from hpstage.cluster.supervision import Child, Supervisor
from hpstage.errors import ClusterError, UsageError
from hpstage.execution.shared_device import SHARERS
from hpstage.training.identity.accelerators import HIDDEN
from tests.dask.commands import Command, children, free_port, has_ended, until, workers
from tests.dask.conftest import Start

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, and needs prctl")


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start_scheduler(start: Start, port: int) -> Callable[..., Command]:
    def start_scheduler(*options: str) -> Command:
        command = start("scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard", *options)
        command.says("Scheduler at:")
        return command

    return start_scheduler


@pytest.mark.ci
@linux
def test_the_worker_command_waits_for_its_scheduler_restarts_workers_and_stops_cleanly(
    start: Start, start_scheduler: Callable[..., Command], port: int, tmp_path: Path
) -> None:
    address = f"tcp://127.0.0.1:{port}"
    # Found by its file. Two by name, and an option of Dask's that is not ours.
    file = tmp_path / "scheduler.json"
    command = start(
        "worker", "--resources", "memory=3", "--scheduler-file", str(file), "--nworkers", "2", "--name", "here"
    )
    command.says(f"no scheduler at {file}")

    scheduler = start_scheduler("--scheduler-file", str(file))
    with Client(address, set_as_default=False) as client:
        first = workers(client, 2)
        assert first == children(command.process.pid)
        known = client.scheduler_info(n_workers=-1)["workers"].values()
        assert {worker["name"] for worker in known} == {"here-0", "here-1"}
        assert [worker["nthreads"] for worker in known] == [1, 1]
        assert [worker["resources"] for worker in known] == [{"memory": 3.0}] * 2
        assert set(client.run(lambda dask_worker: dask_worker.memory_manager.memory_limit).values()) == {None}
        assert set(client.run(dask.config.get, "distributed.worker.profile.enabled").values()) == {False}
        assert set(client.run(dask.config.get, "distributed.comm.timeouts.tcp").values()) == {"30s"}
        assert client.run_on_scheduler(dask.config.get, "distributed.scheduler.worker-ttl") == "60s"

        victim = min(first)
        os.kill(victim, signal.SIGKILL)
        second = workers(client, 2, without={victim})
        assert len(first & second) == 1
        command.says("by SIGKILL")

    scheduler.process.kill()
    scheduler.process.wait()
    until(lambda: command.said.count("no scheduler at") == 2, "the workers miss their scheduler")
    scheduler = start_scheduler("--scheduler-file", str(file))
    with Client(address, set_as_default=False) as client:
        third = workers(client, 2, without=first | second)

    assert command.stop() == 0
    assert all(has_ended(worker) for worker in third)
    assert scheduler.said.count("Retired worker") == 2  # nobody is to blame for what they have left undone
    assert scheduler.stop() == 0


@pytest.mark.ci
@linux
def test_a_worker_ends_when_its_supervisor_is_killed(
    start: Start, start_scheduler: Callable[..., Command], port: int
) -> None:
    command = start("worker", f"127.0.0.1:{port}", "--nworkers", "1", "--name", "alone")
    start_scheduler()
    with Client(f"tcp://127.0.0.1:{port}", set_as_default=False) as client:
        [worker] = workers(client, 1)
        assert [known["name"] for known in client.scheduler_info(n_workers=-1)["workers"].values()] == ["alone"]
        os.kill(worker, signal.SIGSTOP)  # not even one that can do nothing for it
        command.process.kill()
        until(lambda: has_ended(worker), f"worker {worker} has ended")


@linux
def test_a_worker_does_not_start_if_its_supervisor_has_already_ended() -> None:
    words = [sys.executable, "-m", "hpstage.cluster.supervised_worker", str(2**22 + 1), "tcp://127.0.0.1:1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "the process that started this one has ended" in done.stderr


@pytest.mark.ci
def test_a_worker_command_that_waits_for_its_scheduler_is_stopped_by_sigint(start: Start, port: int) -> None:
    command = start("worker", "--nworkers", "1", DASK_SCHEDULER_ADDRESS=f"tcp://127.0.0.1:{port}")
    command.says("Connection refused); waiting for it")
    assert f"no scheduler at tcp://127.0.0.1:{port} (" in command.said
    assert command.stop(signal.SIGINT) == 0


def supervise(code: str, *signals: tuple[str, signal.Signals]) -> tuple[int, list[str]]:
    """Status and lines of a supervisor of one process of Python, sent each signal when that line has been said."""

    def log(line: str) -> None:
        lines.append(line)
        for awaited, number in signals:
            if awaited in line:
                os.kill(os.getpid(), number)

    async def ready() -> None:
        log("ready")

    async def run() -> int:
        child = Child("it", (sys.executable, "-c", code), dict(os.environ))
        return await Supervisor([child], ready=ready, log=log).run()

    lines: list[str] = []
    return asyncio.run(run()), lines


def test_a_process_that_ends_repeatedly_is_restarted_with_growing_delays() -> None:
    status, lines = supervise("import sys; sys.exit(3)", ("0.4 s", signal.SIGTERM))
    assert status == 0
    assert [line for line in lines if line != "ready"] == [
        *(f"it left with exit status 3; it is restarted in {delay} s" for delay in ("0.1", "0.2", "0.4")),
        "stopping; interrupt again to stop at once",
    ]


def test_a_second_signal_kills_a_supervised_process_that_does_not_end(tmp_path: Path) -> None:
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"  # it can be terminated now, and will not end
        "while True: time.sleep(60)\n"
    )
    status, lines = supervise(code)
    assert status == 1
    assert lines == ["ready", "stopping; interrupt again to stop at once"]


def test_supervising_a_missing_command_raises_an_error() -> None:
    async def ready() -> None: ...

    async def run() -> int:
        return await Supervisor([Child("it", ("/there/is/no/such/command",), {})], ready=ready, log=print).run()

    with pytest.raises(FileNotFoundError):
        asyncio.run(run())


def test_workers_are_assigned_one_gpu_each_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices = ["3", "GPU-5a", "MIG-7"]
    assert [environment_of(worker, devices, hide=False)["CUDA_VISIBLE_DEVICES"] for worker in range(4)] == [
        *devices,
        "3",
    ]
    assert environment_of(0, devices, hide=False)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")  # which count in the order of whoever has set it
    assert "CUDA_DEVICE_ORDER" not in environment_of(0, ["3", "1"], hide=False)
    assert environment_of(0, [], hide=False, workers=4) == {host_memory.SHARERS: "4"}
    hidden = {"CUDA_VISIBLE_DEVICES": "", HIDDEN: "1"}
    assert environment_of(0, [], hide=True, workers=4) == {host_memory.SHARERS: "4", **hidden}


def test_workers_that_share_a_gpu_receive_the_number_of_sharers() -> None:
    assert how_many(None, 3, ["0", "1"]) == 6
    assert how_many(None, None, ["0", "1"]) == 2
    assert how_many(None, None, [], accelerator=True) == 1
    assert how_many(3, None, [], accelerator=True) == 3
    assert [environment_of(worker, ["0", "1"], hide=False, workers=6)[SHARERS] for worker in range(6)] == ["3"] * 6
    assert environment_of(2, ["0", "1"], hide=False, workers=3)[SHARERS] == "2"
    for arguments, problem in (
        ((None, 2, []), "2 workers per GPU were requested, but there is no usable GPU"),
        ((4, 2, ["0"]), "4 workers and 2 workers per GPU were requested"),
        ((None, 0, ["0"]), "workers_per_gpu is 0"),
    ):
        with pytest.raises(UsageError, match=problem):
            how_many(*arguments)  # type: ignore[arg-type]


def test_gpus_are_assigned_in_groups_to_workers_that_use_several() -> None:
    assert grouped(["0", "1", "2"], 1) == ["0", "1", "2"]
    assert grouped(["0", "1", "2", "GPU-5a", "4"], 2) == ["0,1", "2,GPU-5a"]
    assert environment_of(1, grouped(["0", "1", "2", "3"], 2), hide=False)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert grouped([], 2) == []
    with pytest.raises(ClusterError, match="4 GPUs per worker were requested, but torch finds 2 here"):
        grouped(["0", "1"], 4)


@pytest.mark.parametrize(
    ("named", "count", "visible", "identified"),
    [
        (None, 2, ["0", "1"], ("of 0", "of 1")),
        ("5, 3", 2, ["5", "3"], ("of 0", "of 1")),
        ("GPU-5a,GPU-7b", 2, ["GPU-5a", "GPU-7b"], ("of 0", "of 1")),
        ("0,9", 1, ["0"], ("of 0",)),  # where there is no such device, CUDA ends
        ("MIG-a,MIG-b", 1, ["MIG-a", "MIG-b"], ("a", "b")),  # of which a process sees the first one
        ("MIG-a", 0, [], ()),
        ("", 0, [], ()),
    ],
)
def test_gpus_are_identified_by_uuid_for_each_form_of_cuda_visible_devices(
    named: str | None, count: int, visible: list[str], identified: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)  # imports torch, which loads libraries
    monkeypatch.setattr("ctypes.CDLL", lambda name: None)  # the driver's
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(uuid=f"of {index}"))
    assert visible_devices() == visible
    assert identities(2) == identified
    assert identities(1) == identified[:1]
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace())  # of an older torch
    assert identities(2) == tuple(name.removeprefix("MIG-") for name in visible)


@pytest.mark.parametrize(("accelerator", "expected"), [("xpu", True), (None, False)])
def test_another_accelerator_is_detected_on_linux_only_if_its_driver_library_loads(
    accelerator: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpstage.training.identity.accelerators.other", lambda: accelerator)
    monkeypatch.setattr("sys.platform", "darwin")
    assert has_other_accelerator() == expected
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("hpstage.cluster.devices._loads", lambda library: library == "libze_loader.so.1")
    assert has_other_accelerator() == expected
    monkeypatch.setattr("hpstage.cluster.devices._loads", lambda library: False)
    assert not has_other_accelerator()


def test_no_more_gpus_are_used_than_requested() -> None:
    assert first_devices(["0", "1"], None) == ["0", "1"]
    assert first_devices(["0", "1"], 1) == ["0"]
    with pytest.raises(ClusterError, match="3 GPUs were requested, but torch finds 2"):
        first_devices(["0", "1"], 3)


def test_dask_settings_in_environment_variables_are_not_overridden() -> None:
    ttl = "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL"
    assert scheduler_environment({})[ttl] == "60s"
    assert scheduler_environment({ttl: "5s", "HOME": "/h"})[ttl] == "5s"
    profile = "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED"
    assert worker_environment({})[profile] == "False"
    assert worker_environment({profile: "True", "HOME": "/h"}).items() >= {(profile, "True"), ("HOME", "/h")}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["worker"], "SCHEDULER is missing"),
        (["worker", "tcp://host:1", "--no-such-option"], "no-such-option"),
        (["scheduler", "--no-such-option"], "no-such-option"),
        (["worker", "host:1", "--tls-cert", __file__], "tls://host:8786"),
        (["worker", "tcp://host:1", "--tls-cert", "/not/there"], "does not exist"),
        (["worker", "tcp://host:1", "--gpus", "99"], "99 GPUs were requested"),
        (["worker", "tcp://host:1", "--gpus", "0", "--workers-per-gpu", "2"], "there is no usable GPU"),
    ],
)
def test_bad_arguments_of_the_scheduler_and_worker_commands_are_refused(words: list[str], problem: str) -> None:
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UsageError | ClusterError)
    assert problem in str(done.exception)


def test_the_version_option_of_the_worker_command_prints_the_version_of_dask() -> None:
    done = CliRunner().invoke(app, ["worker", "--version"])
    assert done.exit_code == 0
    assert distributed.__version__ in done.output


def test_importing_the_command_line_loads_neither_dask_nor_torch() -> None:
    code = "import sys, hpstage.cli.app; print(sorted({'dask', 'distributed', 'torch', 'optuna'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("command", ["scheduler", "worker"])
def test_help_of_the_scheduler_and_worker_commands_shows_an_example_call(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"])
    assert done.exit_code == 0
    assert f"hpstage {command} --scheduler-file /shared/scheduler.json\n" in done.output


def as_dask_raises(error: Exception) -> None:
    try:
        raise error
    except Exception as raised:
        convert_stream_closed_error("<TLS local=tls://127.0.0.1:52560>", raised)


@pytest.mark.parametrize("closed", [True, False])
def test_a_refused_certificate_is_reported_as_a_tls_failure(closed: bool) -> None:
    refusal = ssl.SSLError(1, "tlsv1 alert unknown ca")
    refusal.reason = "TLSV1_ALERT_UNKNOWN_CA"
    with pytest.raises(OSError, match="unknown ca") as caught:
        as_dask_raises(StreamClosedError(refusal) if closed else refusal)
    assert _innermost(caught.value) == f"TLS fails: {refusal}; the scheduler's log has the reason"
