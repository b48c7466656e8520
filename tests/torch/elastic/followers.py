"""Followers of gangs: processes of their own, to which a test sends what to join. Run as a script, one of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from hpstage.checkpoints import FolderCheckpoints, LiveCache
from hpstage.checkpoints.state_tree import digest
from hpstage.errors import HpstageError
from hpstage.execution.control import Control
from hpstage.execution.runner import ChainRunner
from hpstage.plan.facts import StateKey, WorkerId
from hpstage.plan.messages import Chain
from hpstage.trainable import Elastic, Trainable
from hpstage.training.trainables import as_trainable
from tests.torch.elastic.cases import ALL, STEPS, hp_at

ROOT = Path(__file__).parents[3]
WORKLOAD = "tests"
TIMEOUT = 300.0
"""Seconds to wait for processes that do come: they import torch first, on machines that are busy."""


def key_of(case: str, step: int) -> StateKey:
    return StateKey(f"{case}-{step}".replace(" ", "_"))


class Follower:
    """A process that follows on request."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.torch.elastic.followers", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def send(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Followers:
    """As many as are needed; they stay for further gangs."""

    def __init__(self, folder: Path) -> None:
        self.store = FolderCheckpoints(folder, WORKLOAD)
        self._folder = folder
        self._started: list[Follower] = []

    def first(self, count: int) -> list[Follower]:
        for follower in list(self._started):
            if follower.process.poll() is not None:
                follower.close()
                self._started.remove(follower)
        while len(self._started) < count:
            self._started.append(Follower(self._folder))
        return self._started[:count]

    def close(self) -> None:
        for follower in self._started:
            follower.close()

    @contextmanager
    def gang(self, case: str, trainable: Any, step: int, size: int) -> Iterator[list[Follower]]:
        """A gang with this process as its leader, which is at ``step``; the followers' answers are left to be read."""
        assert isinstance(trainable, Elastic)
        key = key_of(case, step)
        self.store.save(key, trainable.state_dict(), step=step, parent=None)  # type: ignore[attr-defined]
        followers = self.first(size - 1)
        address = trainable.open_gang("127.0.0.1")
        for rank, follower in enumerate(followers, start=1):
            follower.send(case=case, key=key, address=address, rank=rank, size=size)
        trainable.lead(size, TIMEOUT)
        yield followers


def trained(case: str, start: int = 0, stop: int = STEPS, trainable: Trainable | None = None) -> Any:
    if trainable is None:
        trainable = as_trainable(ALL[case]())
        trainable.setup(hp_at(0))
    for step in range(start, stop):
        trainable.train(step, hp_at(step))
    return trainable


def _lead(store: FolderCheckpoints, order: dict[str, Any]) -> None:
    """Lead a gang, and train until the process is killed."""
    trainable: Any = trained(order["case"], stop=1)
    store.save(StateKey(order["key"]), trainable.state_dict(), step=1, parent=None)
    print(json.dumps(trainable.open_gang("127.0.0.1")), flush=True)  # noqa: T201
    trainable.lead(order["size"], TIMEOUT)
    print(json.dumps("formed"), flush=True)  # noqa: T201
    while True:
        trained(order["case"], 1, STEPS, trainable)


def _in_chain(runner: ChainRunner, order: dict[str, Any]) -> Any:
    """Follow a chain, or run one alone, and return its reports."""
    chain = msgspec.json.decode(order["chain"], type=Chain)
    try:
        if "address" in order:
            runner.follow(chain, order["address"], order["rank"])
            return {}
        return json.loads(msgspec.json.encode(list(runner.run(chain, Control()))))
    except HpstageError as error:
        return {"error": type(error).__name__}


def main(folder: str) -> None:
    torch.set_num_threads(1)
    store = FolderCheckpoints(folder, WORKLOAD)
    trainables: dict[str, Any] = {}
    runners: dict[str, ChainRunner] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "lead" in order:
            _lead(store, order)
        case = order["case"]
        trainable = trainables.setdefault(case, as_trainable(ALL[case]()))
        if "chain" in order:
            if case not in runners:
                live = LiveCache()
                runners[case] = ChainRunner(trainable, store, live, live.get, worker=WorkerId("follower"))
            print(json.dumps(_in_chain(runners[case], order)), flush=True)  # noqa: T201
            continue
        trainable.setup(hp_at(0))
        trainable.load_state_dict(store.load(StateKey(order["key"])))
        try:
            word = trainable.follow(order["address"], order["rank"], order["size"], order.get("timeout", TIMEOUT))
            answer = {"word": word, "digest": digest(trainable.state_dict()) if word else ""}
        except HpstageError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
