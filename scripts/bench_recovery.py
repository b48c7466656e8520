"""How long a search stands still when something dies: medians of ten, with real processes on this host.

    .venv/bin/python scripts/bench_recovery.py [--times 10] [--kinds KIND ...] [--json FILE]

A search on two Dask workers, its plan on a Redis server with an append-only file; a step takes 20 ms, a state is kept
every 8 steps. Each time one process is killed with -9 and started again at once, as a supervisor would. Seconds from
the kill to

worker      the next state on the way that the worker was on (another, or a new one, loads the last saved state)
driver      the next state of the search, by the same call in a new process (its imports and its connection included)
gone        another driver on the plan knowing that this one is gone: from then on it trains what both want
scheduler   the next state of the search (its workers end with it, and new ones join)
Redis       the next record in the journal, by a driver that has waited

The training of up to 8 steps is included, 0.2 s. Takes about five minutes on two cores.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from command_line import parser_of, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/ is no part of what is installed

from hpstage.errors import StoreError
from hpstage.plan.log import split
from hpstage.store import RedisJournal
from tests.faults.site import Process, Site

PATIENCE = 90.0


class Bench:
    """A site with one search at work on it."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._journal = RedisJournal(site.redis.url, prefix=site.prefix)
        self._round = 0
        self._driver: Process | None = None

    def kill_worker(self) -> float:
        self._at_work()
        running = self._running()
        address = next(reversed(running.values()))
        [index] = [i for i, worker in enumerate(self._site.workers) if worker.address == address]
        before, began = len(self._journal), time.monotonic()
        self._site.workers[index].kill()
        lost = self._wait(before, lambda fact: fact["type"] == "ChainLost" and fact["worker"] == address)
        place = lost["node"], lost["step"]
        self._wait(before, lambda fact: fact["type"] == "StateReached" and (fact["node"], fact["start"]) == place)
        return time.monotonic() - began

    def kill_driver(self) -> float:
        driver = self._at_work()
        before, began = len(self._journal), time.monotonic()
        driver.kill()
        self._driver = self._start()
        self._wait(before, lambda fact: fact["type"] == "StateReached")
        return time.monotonic() - began

    def driver_is_gone(self) -> float:
        driver = self._at_work()
        other = self._site.drive(
            self._site.task("halving", round=self._round, seed=self._round, trials=200, pause=0.02)
        )
        pid = other.popen.pid
        joined = self._wait(0, lambda fact: fact["type"] == "DriverJoined" and fact["pid"] == pid)
        self._wait(0, lambda fact: fact["type"] == "TargetAsked" and fact["driver"] == joined["driver"])
        before, began = len(self._journal), time.monotonic()
        driver.kill()
        self._wait(before, lambda fact: fact["type"] == "DriverLeft" and fact["reason"] == "gone")
        seconds = time.monotonic() - began
        other.kill()
        self._driver = None
        return seconds

    def kill_scheduler(self) -> float:
        self._at_work()
        before, began = len(self._journal), time.monotonic()
        assert self._site.scheduler is not None
        self._site.scheduler.kill()
        self._site.start_scheduler()
        running = set(self._running())

        def on_the_new_one(fact: dict[str, Any]) -> bool:
            # Reports that workers sent before they knew of the loss may still come.
            return fact["type"] == "StateReached" and fact["chain"] not in running

        self._wait(before, on_the_new_one)
        return time.monotonic() - began

    def kill_redis(self) -> float:
        self._at_work()
        before, began = len(self._journal), time.monotonic()
        self._site.redis.kill()
        self._site.redis.start()
        self._wait(before, lambda fact: True)
        return time.monotonic() - began

    def close(self) -> None:
        if self._driver is not None:
            self._driver.kill()
        self._journal.close()

    def _start(self) -> Process:
        task = self._site.task("full", round=self._round, seed=self._round, trials=200, pause=0.02)
        return self._site.drive(task)

    def _at_work(self) -> Process:
        """A driver whose chains run, one on each worker, for a while yet; a new search if the last is over."""
        if self._driver is None or self._driver.popen.poll() is not None or self._ending():
            if self._driver is not None:
                self._driver.kill()
            self._round += 1
            self._driver = self._start()
        deadline = time.monotonic() + PATIENCE
        while True:
            self._site.revive()
            addresses = {worker.address for worker in self._site.workers}
            before = len(self._journal)
            if len(addresses & set(self._running().values())) == len(self._site.workers):
                self._wait(before, lambda fact: fact["type"] == "StateReached")
                if len(addresses & set(self._running().values())) == len(self._site.workers):
                    return self._driver
            assert time.monotonic() < deadline, f"nothing runs: {self._driver.tail()}"
            time.sleep(0.05)

    def _ending(self) -> bool:
        """Has the present search trained most of what there is to train?"""
        name = f"full-{self._round}"
        facts = facts_of(self._journal.read())
        ended = [fact for fact in facts if fact["type"] == "TrialEnded" and fact["study"] == name]
        return len(ended) > 60

    def _running(self) -> dict[str, str]:
        """The workers of chains that run now, in the order of their starts."""
        running: dict[str, str] = {}
        owners: dict[str, str] = {}
        for fact in facts_of(self._journal.read()):
            match fact["type"]:
                case "ChainStarted":
                    running[fact["chain"]], owners[fact["chain"]] = fact["worker"], fact["driver"]
                case "ChainClosed":
                    running.pop(fact["chain"], None)
                case "DriverLeft":
                    running = {chain: on for chain, on in running.items() if owners[chain] != fact["driver"]}
        return running

    def _wait(self, since: int, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first fact from record ``since`` on of which that holds, and replace workers that have ended."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                records = self._journal.read(since)
                since += len(records)
                for fact in facts_of(records):
                    if holds(fact):
                        return fact
            except StoreError:
                continue
            self._site.revive()
            time.sleep(0.002)
        raise SystemExit(
            "what was waited for did not come; the driver said:\n" + (self._driver or self._start()).tail()
        )


def facts_of(records: Sequence[bytes]) -> list[dict[str, Any]]:
    return [json.loads(fact) for record in records for fact in split(record)]


KINDS: dict[str, Callable[[Bench], float]] = {
    "worker": Bench.kill_worker,
    "driver": Bench.kill_driver,
    "gone": Bench.driver_is_gone,
    "scheduler": Bench.kill_scheduler,
    "Redis": Bench.kill_redis,
}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what dies")
    options = parser.parse_args()
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, Site(Path(folder) / "site", workers=2) as site:
        bench = Bench(site)
        print(f"{'seconds, of ' + str(options.times):<20}{'median':>10}{'least':>10}{'most':>10}")
        for name in options.kinds:
            figures[name] = values = [KINDS[name](bench) for _ in range(options.times)]
            print(f"{name:<20}{statistics.median(values):>10.2f}{min(values):>10.2f}{max(values):>10.2f}", flush=True)
        bench.close()
    write(options, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
