"""What the dashboard's page and the metrics cost Dask's scheduler: the time that others wait for it.

    .venv/bin/python scripts/bench_dashboard.py [--rounds 5] [--seconds 6] [--stages 10000] [--rate 100] [--browser]
                                                [--gestures 2000 10000] [--json FILE]

A scheduler in a process of its own receives a simulated search with --stages trained stages, as from a driver. Then
a client requests an echo every 10 ms, whether or not it has answered, and waits for a no-op task on one worker twice a
second. In each round, one after the other:

alone       nobody looks
page        the page /hpstage is open
streaming   the page is open, and --rate records a second come in
metrics     /metrics is read once a second

The page is opened by a websocket client that takes all that is sent to it and draws nothing; with --browser by the
system's chromium, which then needs a core of its own. Printed are medians over the rounds; the ratios are those to the
same round's "alone". busy: the share of a core that the scheduler's process took.

With --gestures, also (--rounds 0: only) how long the page takes in chromium for what a user does with trees of so many
trials (gestures.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil
from bench_status import fill
from command_line import parser_of, write
from distributed import Client
from gestures import measure
from screenshots import simulated
from tornado.websocket import websocket_connect

from hpstage.cluster.dashboard.follower import HANDLER, Follower
from hpstage.store import MemoryJournal, SQLiteJournal

KINDS = ("alone", "page", "streaming", "metrics")
EVERY = 0.01
"""Seconds between two echoes."""
SETTLING = 2.0
"""Seconds that a page is given to draw for the first time."""


def noop() -> None:
    """The task."""


@contextmanager
def running(*words: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as said:
        process = subprocess.Popen([sys.executable, "-m", *words], stdout=said, stderr=said)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


class Round:
    """The scheduler with its plan, and what can be done to it."""

    def __init__(self, address: str, place: str, pid: int, records: list[bytes], sent: int, rate: float) -> None:
        self._address = address
        self._place = place
        self._process = psutil.Process(pid)
        self._records = records
        self._rate = rate
        self._sent = sent
        self.journal = MemoryJournal()
        self.journal.append(records[:sent])

    def measure(self, kind: str, seconds: float, browser: bool) -> dict[str, float]:
        stop = threading.Event()
        with ExitStack() as leaving:
            if kind in ("page", "streaming"):
                leaving.enter_context(in_browser(self._place) if browser else connected(self._place))
            others = {"streaming": self._stream, "metrics": self._scrape}
            threads = [threading.Thread(target=others[kind], args=(stop,))] if kind in others else []
            for thread in threads:
                thread.start()
            time.sleep(SETTLING)
            before, began = sum(self._process.cpu_times()[:2]), time.monotonic()
            echoes, tasks = asyncio.run(ask(self._address, seconds))
            busy = (sum(self._process.cpu_times()[:2]) - before) / (time.monotonic() - began)
            stop.set()
            for thread in threads:
                thread.join()
        return {
            "echo_p50_ms": 1e3 * statistics.median(echoes),
            "echo_p95_ms": 1e3 * quantile(echoes, 0.95),
            "echo_p99_ms": 1e3 * quantile(echoes, 0.99),
            "task_p50_ms": 1e3 * statistics.median(tasks),
            "busy": busy,
        }

    def _stream(self, stop: threading.Event) -> None:
        began, first = time.monotonic(), self._sent
        while not stop.wait(0.05):
            due = first + int(self._rate * (time.monotonic() - began))
            if due > len(self._records):
                raise SystemExit("the plan has no more records to stream: more --stages, fewer --rounds")
            self.journal.append(self._records[self._sent : due])
            self._sent = due

    def _scrape(self, stop: threading.Event) -> None:
        while not stop.wait(1.0):
            with urllib.request.urlopen(self._place + "/metrics", timeout=30) as answer:
                answer.read()


async def ask(address: str, seconds: float) -> tuple[list[float], list[float]]:
    """Round trips of echoes, counted from when each was due, and of tasks."""
    echoes: list[float] = []
    tasks: list[float] = []

    async def echo(client: Client, due: float) -> None:
        await client.scheduler.echo(data=0)
        echoes.append(time.perf_counter() - due)

    async def work(client: Client, end: float) -> None:
        while time.perf_counter() < end:
            began = time.perf_counter()
            await client.submit(noop, pure=False)
            tasks.append(time.perf_counter() - began)
            await asyncio.sleep(0.5)

    async with Client(address, asynchronous=True, set_as_default=False) as client:
        await client.scheduler.echo(data=0)
        began = time.perf_counter()
        working = asyncio.create_task(work(client, began + seconds))
        asking = []
        for number in range(int(seconds / EVERY)):
            due = began + number * EVERY
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            asking.append(asyncio.create_task(echo(client, due)))
        await asyncio.gather(working, *asking)
    return echoes, tasks


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@contextmanager
def connected(place: str) -> Iterator[None]:
    """The page, with a client that only listens, in a process of its own."""
    with running_script("--listen", place) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"open", "the page could not be opened"
        yield


@contextmanager
def running_script(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


async def listen(place: str) -> None:
    with urllib.request.urlopen(place + "/hpstage", timeout=30) as answer:
        [token] = set(re.findall(r'"token":"([^"]+)"', answer.read().decode()))
    socket = await websocket_connect(place.replace("http", "ws") + "/hpstage/ws", subprotocols=["bokeh", token])
    print("open", flush=True)
    while await socket.read_message() is not None:
        pass


@contextmanager
def in_browser(place: str) -> Iterator[None]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("--browser needs chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
             f"--user-data-dir={profile}", "--window-size=1400,950", place + "/hpstage"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def received(dask_scheduler: object) -> int:
    board = dask_scheduler.handlers[HANDLER].__self__  # type: ignore[attr-defined]
    return max((view.position for view in board.plans.values()), default=0)


def wait_for(true: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit(f"after {seconds:.0f} s still not: {what}")
        time.sleep(0.1)


def records_of(stages: int) -> list[bytes]:
    with tempfile.TemporaryDirectory() as place:
        fill(Path(place), stages)
        with closing(SQLiteJournal(Path(place) / "plan.sqlite", read_only=True)) as journal:
            return journal.read()


def bench(rounds: int, seconds: float, stages: int, rate: float, browser: bool) -> list[dict[str, dict[str, float]]]:
    # What is streamed must be there: three records or so for a stage.
    tail = int(rounds * (seconds + SETTLING + 5) * rate)
    records = records_of(stages + tail // 3)
    found = []
    with scheduler() as (address, site, pid, client):
        one = Round(address, site, pid, records, len(records) - tail, rate)
        with closing(Follower(one.journal, lambda: client)):
            wait_for(lambda: client.run_on_scheduler(received) == len(one.journal), "the plan is sent")
            for number in range(rounds):
                found.append({kind: one.measure(kind, seconds, browser) for kind in KINDS})
                print(f"round {number + 1} of {rounds} is done", file=sys.stderr)
    return found


def bench_gestures(sizes: list[int]) -> dict[int, dict[str, float]]:
    """Milliseconds of each gesture, by the number of trials."""
    found = {}
    for trials in sizes:
        journal = simulated(trials)
        with scheduler() as (_, site, _, client), closing(Follower(journal, lambda: client)):
            wait_for(lambda: client.run_on_scheduler(received) == len(journal), "the plan is sent")  # noqa: B023
            found[trials] = measure(site + "/hpstage", trials)
    return found


@contextmanager
def scheduler() -> Iterator[tuple[str, str, int, Client]]:
    """A scheduler in a process of its own, with one worker: its address, its dashboard's, its process and a client."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as leaving:
        folder = Path(place)
        file = folder / "scheduler.json"
        words = ("hpstage", "scheduler", "--scheduler-file", str(file), "--host", "127.0.0.1", "--port", "0")
        process = leaving.enter_context(
            running(*words, "--dashboard-address", "127.0.0.1:0", log=folder / "scheduler.log")
        )
        wait_for(file.exists, "the scheduler is there")
        # The file is there before the last of it is written.
        wait_for(lambda: file.read_text().endswith("}"), "the scheduler's file is written")
        about = json.loads(file.read_text())
        address, site = about["address"], f"http://127.0.0.1:{about['services']['dashboard']}"
        leaving.enter_context(
            running("hpstage", "worker", address, "--nworkers", "1", "--gpus", "0", "--local-directory", place,
                    log=folder / "worker.log")
        )  # fmt: skip
        client = leaving.enter_context(Client(address, set_as_default=False))
        client.wait_for_workers(1, timeout=60)
        yield address, site, process.pid, client


def table(found: list[dict[str, dict[str, float]]]) -> str:
    names = list(found[0]["alone"])
    lines = [f"{'':<12}" + "".join(f"{name:>14}" for name in names) + f"{'p50 ratio':>14}{'p95 ratio':>14}"]
    for kind in KINDS:
        cells = [statistics.median(one[kind][name] for one in found) for name in names]
        lines.append(f"{kind:<12}" + "".join(f"{cell:>14.2f}" for cell in [*cells, *ratios(found, kind).values()]))
    return "\n".join(lines)


def ratios(found: list[dict[str, dict[str, float]]], kind: str) -> dict[str, float]:
    """Return the medians over the rounds of times relative to those without the page."""
    names = {"p50": "echo_p50_ms", "p95": "echo_p95_ms"}
    return {
        short: statistics.median(one[kind][name] / one["alone"][name] for one in found) for short, name in names.items()
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="that each measurement takes")
    parser.add_argument("--stages", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=100.0, help="records a second that are streamed")
    parser.add_argument("--browser", action="store_true", help="open the page in chromium")
    parser.add_argument("--gestures", type=int, nargs="*", default=[], metavar="TRIALS", help="sizes of trees")
    parser.add_argument("--listen", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.listen is not None:
        asyncio.run(listen(options.listen))
        return 0
    found = (
        bench(options.rounds, options.seconds, options.stages, options.rate, options.browser) if options.rounds else []
    )
    if found:
        print(table(found))
    gestures = bench_gestures(options.gestures)
    for trials, times in gestures.items():
        print(f"{trials:,} trials: " + ", ".join(f"{name} {value:.1f}" for name, value in times.items()))
    relative = {kind: ratios(found, kind) for kind in KINDS} if found else {}
    write(options, {"rounds": found, "ratios": relative, "gestures": gestures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
