"""What training uses and no fork of its process can have for itself: it is trained and verified without such a fork."""

from __future__ import annotations

import asyncio
import functools
import gc
import multiprocessing
import queue
import socket
import subprocess
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.pool import ThreadPool
from typing import Any

import optuna
import pytest
import torch
from torch import nn

import hpstage
from hpstage import schedule as s
from hpstage.execution import held
from hpstage.execution.fork import obstacle
from hpstage.execution.held import has_own_work, held_by
from hpstage.execution.untrained import UntrainedFork
from hpstage.plan.facts import ForkVerified
from hpstage.plan.log import read_facts
from hpstage.store import MemoryJournal
from hpstage.training.code.graph import Graph
from hpstage.training.trainables import as_trainable
from tests.torch.trainables import Small, hp_at, samples

pytestmark = [
    pytest.mark.sampled(2),
    pytest.mark.forks,
    pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only"),
]

Ask = Callable[[], float]
_ECHO = "import sys\nfor line in sys.stdin: print(line.strip(), flush=True)"


@contextmanager
def of_a_process() -> Iterator[Any]:
    with subprocess.Popen(
        [sys.executable, "-c", _ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()  # type: ignore[union-attr]


def answer_by_text(process: Any) -> float:
    process.stdin.write("1\n")
    process.stdin.flush()
    return float(process.stdout.readline())


@contextmanager
def of_a_pipe() -> Iterator[Any]:
    ours, theirs = multiprocessing.Pipe()

    def serve() -> None:
        while theirs.recv_bytes():
            theirs.send_bytes(b"1")

    thread = threading.Thread(target=serve)
    thread.start()
    with ours, theirs:
        yield ours
        ours.send_bytes(b"")
        thread.join()


def answer_by_bytes(connection: Any) -> float:
    connection.send_bytes(b"?")
    return float(connection.recv_bytes())


@contextmanager
def of_a_thread_pool() -> Iterator[Any]:
    with ThreadPool(1) as pool:
        yield pool


def answer_by_apply(pool: Any) -> float:
    return float(pool.apply(int, ("1",)))


@contextmanager
def of_a_loop() -> Iterator[Any]:
    with closing(asyncio.new_event_loop()) as loop:
        yield loop
        loop.run_until_complete(loop.shutdown_default_executor())


def answer_by_a_loop(loop: Any) -> float:
    return float(loop.run_until_complete(loop.run_in_executor(None, int, "1")))


class Served(Small):
    """Weights each loss by what a server answers: always 1."""

    stateless = ("SERVER", "ASK")
    version = data_version = "1"

    def loss(self, model: Any, batch: Any) -> Any:
        return super().loss(model, batch) * ASK(SERVER)


SERVER: Any = None
ASK: Callable[[Any], float] = float


def space(trial: optuna.Trial) -> dict[str, Any]:
    drop = trial.suggest_categorical("drop", [3, 5])
    return {"lr": s.multistep(0.1, [drop], gamma=0.1), "momentum": 0.9, "batch_size": 8, "seed": 3}


def search(trainable: Any, journal: Any = None, **options: Any) -> hpstage.Result:
    return hpstage.optimize(
        optuna.create_study(sampler=optuna.samplers.GridSampler({"drop": [3, 5]}, seed=0)),
        trainable,
        space,
        metric="loss",
        steps=6,
        n_trials=2,
        executor=hpstage.InlineExecutor(),
        store=MemoryJournal() if journal is None else journal,
        **options,
    )


@pytest.mark.timeout(120)  # it hung
@pytest.mark.parametrize(
    ("serving", "ask"),
    [
        (of_a_process, answer_by_text),
        (of_a_pipe, answer_by_bytes),
        (of_a_thread_pool, answer_by_apply),
        (of_a_loop, answer_by_a_loop),
    ],
)
def test_training_that_uses_a_server_is_trained_and_verified_in_one_process(
    serving: Callable[[], Any], ask: Callable[[Any], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [trial.values for trial in search(Small(), verify="off").study.trials]
    journal = MemoryJournal()
    with serving() as server:
        monkeypatch.setitem(globals(), "SERVER", server)
        monkeypatch.setitem(globals(), "ASK", ask)
        assert ask(server) == 1.0
        assert obstacle(Served())
        assert UntrainedFork.made(Served()) is None
        assert [trial.values for trial in search(Served(), journal).study.trials] == alone
    found = [fact.difference for fact in read_facts(journal) if isinstance(fact, ForkVerified)]
    assert found
    assert set(found) == {None}


class Holding(Small):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


def test_connections_held_by_a_trainable_are_found_wherever_they_are_referenced() -> None:
    with ExitStack() as stack:
        ours, theirs = map(stack.enter_context, socket.socketpair())
        reader = stack.enter_context(ours.makefile("rb"))
        for held in ({"a": [ours]}, functools.partial(print, theirs), (lambda: ours), theirs.send, [reader]):
            assert "is one end of a connection" in held_by(Holding(held))
        connection = stack.enter_context(multiprocessing.Pipe()[0])
        assert "is one end of a connection" in held_by(Holding([connection]))
    assert held_by(Holding([ours, theirs, reader, connection])) == ""


class Making(Small):
    """Holds nothing itself: what it makes does."""

    stateless = ("END", "model.end", "optimizer.end", "dataset.end", "dataset.datasets[0].end")
    version = data_version = "1"

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return self.made("model", super().model(hp))

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return self.made("optimizer", super().optimizer(model, hp))

    def dataset(self) -> Any:
        data = self.made("data set", super().dataset())
        if self.where == "stream":
            return Stream(END)
        return hpstage.torch.Mixture({"one": self.made("mixture", data)}) if self.where == "mixture" else data

    def made(self, name: str, obj: Any) -> Any:
        if self.where == name:
            obj.end = END
        return obj


class Stream:
    def __init__(self, end: Any) -> None:
        self.end = end

    def __iter__(self) -> Iterator[Any]:
        return zip(*samples(), strict=True)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


END: Any = None


@pytest.mark.parametrize("where", ["model", "optimizer", "data set", "mixture", "stream"])
def test_connections_held_by_model_optimizer_or_data_are_found(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        ours, _ = map(stack.enter_context, socket.socketpair())
        loop: Any = as_trainable(Making(where))
        stack.callback(loop.close)
        monkeypatch.setitem(globals(), "END", ours)
        loop.setup(hp_at(0) | {"mixture.one": 1.0})
        loop.prepare()
        monkeypatch.setitem(globals(), "END", None)
        others = obstacle()  # which other tests have left
        assert obstacle(loop) == (others or "it holds a socket.socket, which is one end of a connection")


def test_each_function_is_searched_for_connections_once() -> None:
    code = types.ModuleType("tests.of_many_functions")
    exec("".join(f"def f{n}(): return f{n + 1}\n" for n in range(20)), vars(code))
    visited = Counter[int]()

    class Counting(Graph):
        def _function(self, function: types.FunctionType) -> None:
            visited[id(function)] += 1
            super()._function(function)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(held, "Graph", Counting)
        assert held_by(Holding([vars(code)[f"f{n}"] for n in range(20)])) == ""
    assert {visited[id(vars(code)[f"f{n}"])] for n in range(20)} == {1}


def test_the_thread_of_a_tensorboard_writer_is_found(tmp_path: Any) -> None:
    tensorboard = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    with closing(tensorboard.EventFileWriter(str(tmp_path))) as writer:
        assert "a thread" in held_by(Holding(writer))


class Unmade(threading.Thread):
    def __init__(self) -> None:
        pass


class Named(threading.Thread):
    """Calls code of the user's where its name is read."""

    @property
    def name(self) -> str:  # type: ignore[override]
        raise AttributeError("it has no name")


def test_threads_are_found_even_if_their_class_overrides_init_or_name() -> None:
    assert held_by(Holding(Unmade())) == ""
    over = threading.Event()
    named = Named(target=over.wait, daemon=True)
    assert held_by(Holding(named)) == ""
    threading.Thread.start(named)
    try:
        assert "a thread" in held_by(Holding(named))
        assert has_own_work([named])
    finally:
        over.set()
        named.join()


def test_large_data_are_searched_for_connections_last_and_only_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, may_be_held = [], held._may_be_held
    monkeypatch.setattr(held, "_may_be_held", lambda kind: looked.append(kind) or may_be_held(kind))
    data = [[{"a": [n]}, {"b": [n]}] for n in range(25_000)]
    assert held_by(Holding(data)) == ""
    assert len(looked) <= 100_000
    with ExitStack() as stack:
        ours, theirs = map(stack.enter_context, socket.socketpair())
        assert "is one end of a connection" in held_by(Holding((data, {"a": {"b": [ours]}}, data)))
        assert "is one end of a connection" in held_by(Holding([*range(1000), theirs]))
    long = [[*range(1000)] for _ in range(5000)]
    looked.clear()
    assert held_by(Holding(long)) == ""
    assert len(looked) <= 4000


def test_files_queues_locks_and_standard_streams_are_not_connections(tmp_path: Any) -> None:
    with (tmp_path / "file").open("w") as file:
        assert held_by(Holding([file, sys.__stdout__, queue.Queue(), threading.Lock(), threading.local()])) == ""
    assert held_by(Holding(threading.Thread(target=print))) == ""  # it does not run
    assert held_by(Small()) == ""


def test_a_subprocess_held_by_a_trainable_is_found_until_it_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert "a process of its own" in held_by(Holding(process))
        process.communicate(b"\n")
    assert held_by(Holding(process)) == ""


def test_threads_that_run_user_code_or_work_submitted_by_steps_are_found() -> None:
    over = threading.Event()
    mine, librarys, own = (
        threading.Thread(target=over.wait if name else lambda: over.wait(), name=name, daemon=True)
        for name in (None, "a library's", "hpstage-some")
    )
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1, "hpstage-own") as of_hpstage:
        for thread in (mine, librarys, own):
            thread.start()
        worker, other = pool.submit(threading.current_thread).result(), of_hpstage.submit(threading.current_thread)
        found = [has_own_work([thread]) for thread in (mine, librarys, own, worker, other.result())]
        over.set()
    assert found == [True, False, False, True, False]
    assert not has_own_work([threading.current_thread()])


@pytest.mark.parametrize("library", ["asyncio", "uvloop"])
def test_the_thread_pool_of_an_event_loop_counts_unless_the_loop_is_running(library: str) -> None:
    async def worker() -> threading.Thread:
        return await asyncio.get_running_loop().run_in_executor(None, threading.current_thread)

    async def counted() -> bool:
        return has_own_work([await worker()])

    with closing(pytest.importorskip(library).new_event_loop()) as loop:
        assert not loop.run_until_complete(counted())
        assert has_own_work([loop.run_until_complete(worker())])
        loop.run_until_complete(loop.shutdown_default_executor())


def test_event_loops_are_searched_for_once_for_all_threads_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    # What another test has left in this process may have a loop that runs, of which more is read.
    counting = {**vars(gc), "get_objects": lambda: calls.append(1) or gc.get_objects()}
    monkeypatch.setattr(held, "gc", types.SimpleNamespace(**counting))
    both = threading.Barrier(3, timeout=60)
    with ThreadPoolExecutor(2, "asyncio") as pool:
        working = [pool.submit(both.wait) for _ in range(2)]
        both.wait()
        assert has_own_work(pool._threads)
        assert all(future.result() >= 0 for future in working)
    assert len(calls) == 1
