"""What searches of several hosts need, on hosts of their own: Redis, a Dask scheduler, three workers, two drivers."""

from __future__ import annotations

import json
import time
from ast import literal_eval
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis

from hpstage.plan.log import split
from tests.dask.studies import Trials
from tests.faults import oracles
from tests.hosts.driver import undisturbed
from tests.hosts.network import Host, Network, Process

WORKERS = ("w1", "w2", "w3")
LEASE = 4.0
"""Seconds of a driver's lease."""
_REDIS = "6379"
_DASK = "8786"
_PATIENCE = {
    # Silence after which the scheduler gives a worker up; it allows no fewer.
    "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "5s",
    # The least that Dask's sockets take.
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "12s",
    "HPSTAGE_LEASE_SECONDS": str(LEASE),
}


class Lab:
    """Use it as a context; entering returns when all workers are there.

    The test itself is on none of the hosts. It sees Redis by a socket in the folder, whatever is cut off.
    """

    def __init__(self, folder: Path, redis_program: str) -> None:
        self.folder = folder
        self.network = Network(folder, "store", "head", "desk", *WORKERS)
        self.workers: dict[str, Process] = {}  # their supervisors
        self.dask: Process  # the scheduler
        self._program = redis_program
        self._socket = folder / "redis.sock"
        self._closing = ExitStack()

    def __enter__(self) -> Lab:
        with ExitStack() as closing:
            closing.enter_context(self.network)
            self._start()
            self.redis = closing.enter_context(redis.Redis(unix_socket_path=str(self._socket)))
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def __getitem__(self, host: str) -> Host:
        return self.network[host]

    def _start(self) -> None:
        store, head = self["store"], self["head"]
        place = ["--bind", store.address, "--port", _REDIS, "--protected-mode", "no", "--dir", str(self.folder)]
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        store.run(self._program, *place, "--unixsocket", str(self._socket), *durable)
        until(self._socket.exists, "Redis is there")
        place = ["--host", head.address, "--port", _DASK, "--no-dashboard"]
        self.dask = head.python("hpstage", "scheduler", *place, **_PATIENCE)
        for name in WORKERS:
            place = ["--nworkers", "1", "--host", self[name].address, "--local-directory", str(self.folder / name)]
            self.workers[name] = self[name].python("hpstage", "worker", self.scheduler, *place, **_PATIENCE)
        until(lambda: self.dask.said.count("Register worker") == len(WORKERS), "all workers are there")

    @property
    def scheduler(self) -> str:
        return f"tcp://{self['head'].address}:{_DASK}"


class Plan:
    """One plan on the lab's Redis, its checkpoints, and what the hosts log of their work in a folder that all share.

    Use it as a context: what it leaves behind in the lab goes.
    """

    def __init__(self, lab: Lab, name: str) -> None:
        self._lab = lab
        self._prefix = name
        self.folder = lab.folder / name
        self.folder.mkdir()
        self._searches: dict[str, tuple[Process, int]] = {}

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *error: object) -> None:
        for process, _ in self._searches.values():
            process.kill()
        for file in self.folder.glob("hold-*"):
            file.unlink()
        for host in self._lab.network.hosts.values():
            host.heal()

    def drive(self, host: str, seed: int) -> Process:
        """A search on a host, which gives the study its name."""
        store = f"redis://{self._lab['store'].address}:{_REDIS}/0?prefix={self._prefix}"
        words = [self._lab.scheduler, store, str(self.folder), host, str(seed)]
        process = self._lab[host].python("tests.hosts.driver", *words, **_PATIENCE)
        self._searches[host] = (process, seed)
        return process

    # --- what is seen of it -------------------------------------------------------------------------------

    def records(self) -> list[bytes]:
        return oracles.raw_journal(self._lab.redis, self._prefix)

    def facts(self, kind: str) -> list[dict[str, Any]]:
        return [fact for record in self.records() for fact in map(json.loads, split(record)) if fact["type"] == kind]

    def joined(self, host: str) -> list[str]:
        """The drivers of a host, in the order in which they joined."""
        return [fact["driver"] for fact in self.facts("DriverJoined") if fact["host"].startswith(f"{host}/")]

    def processes(self, host: str) -> set[str]:
        """Those that have trained there, by the names of their notes."""
        return {path.name for path in self.folder.glob(f"steps-{host}-*")}

    def steps(self, process: str) -> int:
        return len((self.folder / process).read_text().splitlines())

    def trained(self) -> Counter[str]:
        """How often each state was trained, by the workers' own notes."""
        return Counter(line for path in self.folder.glob("steps-*") for line in path.read_text().splitlines())

    def held(self, host: str) -> list[int]:
        """Before which steps its processes wait, or waited when they ended."""
        return [int(path.name.rpartition("-")[2]) for path in self.folder.glob(f"held-{host}-*")]

    def holding(self, *hosts: str) -> bool:
        """Does each of the hosts stand before a step that it may not train?"""
        return all(any(step >= self._first(host) for step in self.held(host)) for host in hosts)

    def _first(self, host: str) -> int:
        return int((self.folder / f"hold-{host}").read_text())

    def hold(self, step: int, *hosts: str) -> None:
        """Train no step from this one on."""
        for host in hosts:
            aside = self.folder / f"aside-{host}"
            aside.write_text(str(step))
            aside.rename(self.folder / f"hold-{host}")

    def release(self, *hosts: str) -> None:
        for host in hosts:
            (self.folder / f"hold-{host}").unlink()

    def shut(self, host: str) -> None:
        """Its search makes no second trial."""
        (self.folder / f"gate-{host}").touch()

    def open(self, host: str) -> None:
        (self.folder / f"gate-{host}").unlink()

    def at_gate(self, host: str) -> bool:
        return (self.folder / f"gate-{host}-reached").exists()

    # --- what must come of it -----------------------------------------------------------------------------

    def check(self) -> None:
        """Every search ends as it would have undisturbed, and everybody kept to the rules."""
        for host, (process, seed) in self._searches.items():
            until(lambda process=process: process.popen.poll() is not None, f"the search on {host} ends")
            assert process.popen.returncode == 0, process.said
            found: Trials = literal_eval((self.folder / f"{host}.txt").read_text())
            assert found == undisturbed(seed)
        records = self.records()
        amiss = oracles.check_journal(records) + oracles.check_failures(records)
        amiss += oracles.check_leases(self._lab.redis, self._prefix)
        amiss += oracles.check_checkpoints(self.folder / "checkpoints", records, set())
        assert not amiss, "\n".join(amiss)


def until(condition: Callable[[], object], what: str, seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"in {seconds:.0f} s it did not happen that {what}"
        time.sleep(0.02)
