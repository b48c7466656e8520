"""Real processes on this host: a Redis server, a Dask cluster of single workers, drivers; and what can befall them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hpstage.checkpoints.folder import SMALL_VARIABLE
from tests.faults.driver import Task
from tests.faults.grind import HUNGRY
from tests.redis_server import RedisServer, executable

ROOT = Path(__file__).parents[2]
LEASE = 3.0
"""Seconds of a driver's lease."""
PATIENCE = 1.0
"""Seconds for which a worker waits for a place of checkpoints that it cannot reach."""
# Where every process of the site has the checkpoints: a link in its own folder, so that they can be taken from one.
_PLACE = "/proc/self/cwd/checkpoints"
WORKER_TTL = 5.0
"""Seconds of silence after which the scheduler gives a worker up; it allows no fewer."""
_FAULTS = Path(__file__).parent / "clock"


@dataclass
class Process:
    """A process in a session of its own, so that its leftovers can be found."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path
    clock: float = 0.0
    frozen: bool = False
    since: float = field(default_factory=time.monotonic)

    @property
    def address(self) -> str:
        """Of a worker, as Dask has it; empty while it is starting."""
        _, _, rest = self.log.read_text().partition("Start worker at:")
        return rest.split()[0] if "\n" in rest else ""

    def signal(self, number: int) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(number)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def freeze(self) -> None:
        self._signal_all(signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        """What it has started is frozen with it, as by a host that stands still."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, number)

    def tail(self, characters: int = 4000) -> str:
        return self.log.read_text(errors="replace")[-characters:]


class Site:
    """All processes of a soak or a test, in one folder; use it as a context."""

    def __init__(self, folder: Path, *, workers: int = 2, space: int = 0) -> None:
        """``space``: bytes of disks of their own for the checkpoints and the studies (needs root)."""
        program = executable()
        assert program is not None, "no redis-server"
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.studies = folder / "studies"
        self.places = folder / "places"  # a folder for each process to run in, with a link to the checkpoints
        self.prefix = "chaos"
        self.redis = RedisServer(program, folder / "redis")
        self.workers: list[Process] = []
        self.processes: list[Process] = []  # all that were ever started
        self.started: Counter[str] = Counter()  # processes, by their names
        self._count = workers
        self._space = space
        self._mounted: list[Path] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self.scheduler: Process | None = None

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    def __enter__(self) -> Site:
        (self.folder / "logs").mkdir(parents=True)
        self.checkpoints.mkdir()
        self.studies.mkdir()
        self.places.mkdir()
        try:
            for place in (self.checkpoints, self.studies) if self._space else ():
                options = ["-t", "tmpfs", "-o", f"size={self._space}", "tmpfs", str(place)]
                subprocess.run(["mount", *options], check=True, capture_output=True)
                self._mounted.append(place)
            self.redis.start()
            self.start_scheduler()
            self.workers = [self._worker(index) for index in range(self._count)]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop_cluster()
        self.redis.kill()
        self._end(self.processes)
        while self._mounted:
            subprocess.run(["umount", "-l", str(self._mounted.pop())], check=True)

    def spawn(self, name: str, words: list[str], *, clock: float = 0.0, **environment: str) -> Process:
        self.started[name] += 1
        log = self.folder / "logs" / f"{name}.{self.started[name]}.log"
        shared = {
            "PYTHONPATH": os.pathsep.join([str(_FAULTS), str(ROOT)]),
            "HPSTAGE_LEASE_SECONDS": str(LEASE),
            "HPSTAGE_CHECKPOINT_PATIENCE": str(PATIENCE),
            "HPSTAGE_TEST_CLOCK": str(clock),
            "HPSTAGE_TEST_REFUSED": os.pathsep.join([_PLACE, str(self._order(name)), str(self._order())]),
        }
        if not (self.places / name / "checkpoints").is_symlink():
            self.mount(name)  # one that starts again may find it missing yet
        with log.open("ab") as output:
            popen = subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=self.places / name,
                env={**os.environ, **shared, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        process = Process(name, popen, log, clock)
        self.processes.append(process)
        return process

    # --- the way to the checkpoints -----------------------------------------------------------------------

    def mount(self, name: str, *, missing: bool = False) -> None:
        """Let the checkpoints be where a process expects them; or an empty folder, as where a mount is missing."""
        place = self.places / name
        (place / "empty").mkdir(parents=True, exist_ok=True)
        aside = place / f"aside-{os.getpid()}"
        aside.symlink_to("empty" if missing else self.checkpoints)
        aside.replace(place / "checkpoints")

    def refuse(self, error: str, name: str = "") -> None:
        """From now on the checkpoints refuse one process, or all, with an error such as EACCES."""
        self._order(name).write_text(error)

    def admit(self, name: str = "") -> None:
        self._order(name).unlink()

    def _order(self, name: str = "") -> Path:
        return self.places / f"{name or 'all'}.refused"

    def slow_down(self, seconds: float | None) -> None:
        """From now on each step takes so long; as long as its task says with ``None``."""
        pause = self.folder / "work" / "pause-of-steps"
        pause.parent.mkdir(exist_ok=True)
        aside = pause.with_name("pause.part")
        aside.write_text("" if seconds is None else str(seconds))
        aside.replace(pause)

    def make_hungry(self, pid: int) -> None:
        """The next step of this process allocates far more than it needs."""
        aside = self.folder / "work" / "hungry.part"
        aside.write_text(str(pid))
        aside.replace(aside.with_name(HUNGRY))

    def misplaced(self) -> list[Path]:
        """What was written into the empty folders."""
        return sorted(self.places.glob("*/empty/**/*"))

    # --- processes ----------------------------------------------------------------------------------------

    def start_scheduler(self) -> None:
        place = ["--host", "127.0.0.1", "--port", str(self._port), "--no-dashboard", "--no-show"]
        patience = {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": f"{WORKER_TTL}s"}
        self.scheduler = self.spawn("scheduler", ["dask", "scheduler", *place], **patience)

    def _worker(self, index: int, clock: float = 0.0) -> Process:
        plain = ["--nthreads", "1", "--memory-limit", "0", "--no-nanny", "--no-dashboard", "--death-timeout", "60"]
        place = ["--host", "127.0.0.1", "--local-directory", str(self.folder / f"worker-{index}")]
        own = {} if index else {SMALL_VARIABLE: "0"}  # the first one's checkpoints have files of their own
        return self.spawn(f"worker-{index}", ["dask", "worker", self.address, *plain, *place], clock=clock, **own)

    def restart_worker(self, index: int, *, clock: float = 0.0) -> None:
        """Kill -9, unless it has ended by itself, and another one in its place."""
        self.workers[index].kill()
        self.workers[index] = self._worker(index, clock)

    def revive(self) -> None:
        """Another worker in the place of each that has ended."""
        for index, worker in enumerate(self.workers):
            if worker.popen.poll() is not None:
                self.restart_worker(index)

    def restore(self) -> None:
        """Let everything run that should, undisturbed, and nothing else: also after a test that failed midway."""
        cluster = [*self.workers, *([self.scheduler] if self.scheduler else [])]
        for process in cluster:
            process.thaw()
        self._end(process for process in self.processes if process not in cluster)
        if not self.redis.runs:
            self.redis.start()
        for order in self.places.glob("*.refused"):
            order.unlink()
        for worker in self.workers:
            self.mount(worker.name)
        self.slow_down(None)
        self.revive()

    def drive(self, task: Task, *, clock: float = 0.0) -> Process:
        """A driver at work on the site's plan and cluster."""
        return self.spawn(task.name, ["tests.faults.driver", str(task.write())], clock=clock)

    def task(self, kind: str, *, round: int = 0, **options: object) -> Task:
        folder = self.folder / "work"
        folder.mkdir(exist_ok=True)
        return Task(
            kind=kind,
            round=round,
            folder=str(folder),
            studies=str(self.studies),
            scheduler=self.address,
            redis=self.redis.url,
            prefix=self.prefix,
            checkpoints=_PLACE,
            **options,  # type: ignore[arg-type]
        )

    def undisturbed(self, task: Task) -> Task:
        """The same study, which nothing happens to: in one process with a store of its own."""
        folder = self.folder / "alone"
        folder.mkdir(exist_ok=True)
        return Task(
            kind=task.kind,
            round=task.round,
            seed=task.seed,
            trials=task.trials,
            folder=str(folder),
            studies=str(folder),
            poison=task.poison,
            deadly=-1,
        )

    def alone(self, task: Task) -> Process:
        """That study at work."""
        return self.spawn(f"{task.name}-alone", ["tests.faults.driver", str(self.undisturbed(task).write())])

    def logs_of_studies(self) -> list[Path]:
        """The files of Optuna's storages."""
        return sorted(self.studies.glob("*.log"))

    def published(self) -> list[Path]:
        """The folders of checkpoints."""
        return sorted(path.parent for path in self.checkpoints.glob("??/*/manifest.json"))

    def packs(self) -> list[Path]:
        """The packs of small checkpoints, those written to last at the end."""
        found = []
        for path in self.checkpoints.glob(".packs/*"):
            with suppress(FileNotFoundError):  # it is compacted at this moment
                found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found)]

    def stop_cluster(self) -> None:
        """End workers and scheduler as a user would; kill those that do not."""
        # One after the other: a worker that is to end while its scheduler ends is likely to hang in closing.
        for processes in (self.workers, [self.scheduler] if self.scheduler else []):
            for process in processes:
                process.thaw()
                process.signal(signal.SIGTERM)
            deadline = time.monotonic() + 15
            for process in processes:
                try:
                    process.popen.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
        self.workers, self.scheduler = [], None

    def internal_errors(self) -> list[str]:
        """What any process has logged that is never to happen, whatever breaks."""
        logs = sorted((self.folder / "logs").glob("*.log"))
        return [f"{log.name} has an InternalError" for log in logs if b"InternalError" in log.read_bytes()]

    def left_over(self) -> list[int]:
        """Processes of the site that still live."""
        return [pid for process in self.processes for pid in members(process.popen.pid)]

    @staticmethod
    def _end(processes: Iterable[Process]) -> None:
        """And whatever they have started."""
        for process in processes:
            for pid in members(process.popen.pid):
                os.kill(pid, signal.SIGKILL)
            process.popen.wait()


def members(session: int) -> Iterator[int]:
    """Processes of a session, but for those that have ended and only wait to be waited for."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name, in parentheses, may hold anything.
                state, _, _, its_session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended by now
            if int(its_session) == session and state != "Z":
                yield int(entry.name)


def can_mount() -> bool:
    """May this process make a disk of its own?"""
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True)
        if made.returncode == 0:
            subprocess.run(["umount", folder], check=True)
        return made.returncode == 0
