"""Training processes, and their server, that stop without ending."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import optuna
import pytest

import hpstage
from hpstage.cluster import DaskExecutor, fork_server, watch
from hpstage.cluster.fork_server import Forked, ForkServer, NoAnswer
from hpstage.cluster.watch import Watch
from hpstage.testing.toys import Tape
from tests.dask.commands import until

pytestmark = pytest.mark.sampled(8)

BEATS = watch._BEATS
ANSWERS = {"answered": True, "reported": False, "computes": False}
COMPUTES = {"answered": False, "reported": False, "computes": True}
SILENT = {"answered": False, "reported": False, "computes": False}
REPORTS = {"answered": True, "reported": True, "computes": False}


class Process:
    """One that does what it is made to do."""

    pid = os.getpid()
    answers = reports = 0

    def ping(self) -> None: ...

    def give_up(self, why: str) -> None: ...


@pytest.mark.parametrize(
    ("beats", "said"),
    [
        ([ANSWERS] * 5, []),
        ([SILENT, ANSWERS] * 5, []),  # late
        ([SILENT, COMPUTES] * BEATS, []),  # code that holds Python's lock
        ([COMPUTES] * 5 * BEATS, []),  # a long step
        ([SILENT] * 3, ["has not answered for 10 s; it will be ended after 60 s"]),
        ([ANSWERS] * 3 * BEATS, ["has neither computed nor reported anything for 60 s"]),
        ([*[ANSWERS] * (BEATS - 1), REPORTS] * 3, []),
    ],
)
def test_a_training_process_that_is_silent_or_idle_is_logged(beats: list[dict[str, bool]], said: list[str]) -> None:
    messages: list[str] = []
    watched = Watch(Process(), 60.0, lambda: True, messages.append)
    for beat in beats:
        watched.beat(**beat)
    assert [text.partition("; it may wait")[0] for text in messages] == said


def test_a_training_process_without_a_chain_is_not_logged_as_idle() -> None:
    messages: list[str] = []
    watched = Watch(Process(), 60.0, lambda: False, messages.append)
    for _ in range(3 * BEATS):
        watched.beat(**ANSWERS)
    assert messages == []


class Stopping(Tape):
    """Its first process stops in the third step, but does not end."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.place = str(folder).lstrip(os.sep)  # no path: its files would be data

    def train(self, step: int, hp: Any) -> None:
        stopped = Path(os.sep) / self.place / "stopped"
        if step == 2 and not stopped.exists():
            stopped.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        super().train(step, hp)


@pytest.mark.ci
@pytest.mark.usefixtures("nothing_ahead")
def test_a_suspended_training_process_is_ended_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "LEAST", 3.0)

    def search(executor: hpstage.Executor, trainable: Tape) -> list[Any]:
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
        space = lambda trial: {"x": trial.suggest_float("x", 0.0, 1.0)}  # noqa: E731
        hpstage.optimize(study, trainable, space, metric="score", steps=6, n_trials=4, executor=executor)
        return [trial.value for trial in study.trials]

    found = search(DaskExecutor(n_workers=2, worker_timeout=3.0), Stopping(tmp_path))
    assert "its training process has not answered for" in caplog.text
    assert "was ended: it had neither answered nor computed for 3 s; its training continues elsewhere" in caplog.text
    assert found == search(hpstage.InlineExecutor(), Tape())


Pair = Callable[[], tuple[Forked, socket.socket]]


@pytest.fixture
def server(nothing_ahead: None) -> Iterator[ForkServer]:
    server = fork_server.fork_server()
    if server is None:
        pytest.skip("forks on Linux only")
    yield server
    server.close()


@pytest.fixture
def fork(server: ForkServer) -> Pair:
    """Forks a training process, and returns it with its channel."""

    def fork() -> tuple[Forked, socket.socket]:
        with ExitStack() as stack:
            ours, theirs = map(stack.enter_context, socket.socketpair())
            nothing = stack.enter_context(open(os.devnull, "w"))
            files = theirs.fileno(), nothing.fileno(), nothing.fileno()
            return server.fork_and_wait(files, "w", variables={}, path=()), ours.dup()

    return fork


@pytest.mark.ci
def test_a_suspended_fork_server_is_skipped_and_used_again_once_it_answers(
    server: ForkServer, fork: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, channel = fork()
    os.kill(server._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(fork_server, "_ANSWERS", 0.5)
    for _ in range(2):  # the second is not sent
        with pytest.raises(NoAnswer, match="does not answer"):
            fork()
    first.kill()
    channel.close()
    os.kill(server._process.pid, signal.SIGCONT)
    until(lambda: first.poll() == -signal.SIGKILL, "its end is messages")
    monkeypatch.setattr(fork_server, "_ANSWERS", 60.0)
    again, channel = fork()
    assert again.poll() is None
    channel.close()
    until(lambda: again.poll() is not None, "it ends with its channel")


def test_the_end_of_a_forked_process_is_noticed_while_its_fork_server_is_suspended(
    server: ForkServer, fork: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "_STATUS", 0.1)
    forked, channel = fork()
    os.kill(server._process.pid, signal.SIGSTOP)
    forked.kill()
    assert asyncio.run(forked.wait()) == -signal.SIGKILL
    channel.close()
