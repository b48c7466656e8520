"""Faults of processes: workers, what trains, drivers, the scheduler."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from tests.faults.another_version import REFUSED
from tests.faults.driver import SILENCE
from tests.faults.memory_group import MemoryGroup
from tests.faults.site import LEASE, WORKER_TTL, members

if TYPE_CHECKING:
    from tests.faults.injector import Injector

HOUR = 3600.0
OUT_OF_MEMORY = "training process out of memory"


class Processes:
    def __init__(self, injector: Injector) -> None:
        self._at = injector
        self._is_exhausted = False

    def _signal_worker(self, number: int) -> str | None:
        worker = self._at.pick(self._at.site.workers)
        if worker is None:
            return None
        worker.signal(number)
        return f"{worker.name} ({worker.popen.pid})"

    def _training(self) -> tuple[str, int] | None:
        """A training process: of a worker, or of a driver's local cluster."""
        processes = [*self._at.site.workers, *self._at.drivers()]
        found = [
            (process.name, pid)
            for process in processes
            if not process.frozen
            for pid in members(process.popen.pid)
            if is_training(pid)
        ]
        return self._at.rng.choice(found) if found else None

    def _signal_training_process(self, number: int) -> str | None:
        training = self._training()
        if training is None:
            return None
        name, pid = training
        _signal(pid, number)
        if number == signal.SIGSTOP:  # one that had no time yet to say that it ends with its worker
            self._at.later(3 * SILENCE, partial(_signal, pid, signal.SIGCONT))
        return f"of {name} ({pid})"

    def _kill_all_training_processes(self) -> str | None:
        """And, half a second later, those that have taken their places: most have trained nothing yet."""
        killed = self._kill_all(is_training)
        if not killed:
            return None
        self._at.later(0.5, lambda: self._kill_all(is_training) and None)
        return f"{killed} of them, and their successors"

    def _kill_all(self, kind: Callable[[int], bool]) -> int:
        processes = [*self._at.site.workers, *self._at.drivers()]
        pids = [pid for process in processes for pid in members(process.popen.pid) if kind(pid)]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)

    def _exhaust_memory(self) -> str | None:
        """The kernel kills a training process that allocates more than its control group may have."""
        training = self._training()
        if training is None or self._is_exhausted:
            return None
        name, pid = training
        group = MemoryGroup(f"hpstage-chaos-{os.getpid()}-{pid}", 64 << 20)
        with suppress(ProcessLookupError):
            group.add(pid)
        self._at.site.make_hungry(pid)
        self._is_exhausted = True
        self._at.later(5.0, partial(self._free_memory, group))
        return f"of {name} ({pid})"

    def _free_memory(self, group: MemoryGroup) -> None:
        group.close()
        self._is_exhausted = False

    def _stutter(self) -> str | None:
        """A training process that is stopped for a moment again and again, but never for long."""
        training = self._training()
        if training is None:
            return None
        name, pid = training
        for number in range(8):
            self._at.later(0.3 * number, partial(_signal, pid, signal.SIGSTOP))
            self._at.later(0.3 * number + 0.2, partial(_signal, pid, signal.SIGCONT))
        return f"of {name} ({pid})"

    def _signal_fork_server(self, number: int) -> str | None:
        drivers = [driver for driver in self._at.drivers() if not driver.frozen]
        servers = [(driver.name, pid) for driver in drivers for pid in members(driver.popen.pid) if is_server(pid)]
        if not servers:
            return None
        name, pid = self._at.rng.choice(servers)
        _signal(pid, number)
        if number == signal.SIGSTOP:
            self._at.later(self._at.rng.uniform(1.0, 20.0), partial(_signal, pid, signal.SIGCONT))
        return f"of {name} ({pid})"

    def _freeze_worker(self) -> str | None:
        if any(worker.frozen for worker in self._at.site.workers):
            return None
        worker = self._at.pick(self._at.site.workers)
        if worker is None:
            return None
        worker.freeze()
        # The scheduler looks once in each WORKER_TTL.
        seconds = self._at.rng.uniform(0.5, 2.2) * WORKER_TTL
        self._at.later(seconds, worker.thaw)
        return f"{worker.name} for {seconds:.1f} s"

    def _shift_worker(self) -> str | None:
        worker = self._at.pick(self._at.site.workers)
        if worker is None:
            return None
        shift = self._at.rng.choice([-HOUR, HOUR])
        self._at.site.restart_worker(self._at.site.workers.index(worker), clock=shift)
        return f"{worker.name} by {shift:+.0f} s"

    # --- drivers ------------------------------------------------------------------------------------------

    def _signal_driver(self, number: int) -> str | None:
        driver = self._at.pick(self._at.drivers())
        if driver is None:
            return None
        driver.signal(number)
        return f"{driver.name} ({driver.popen.pid})"

    def _kill_driver(self, shift: float) -> str | None:
        driver = self._at.pick(self._at.drivers())
        if driver is None:
            return None
        self._at.clock_of_next[driver.name] = shift
        driver.kill()
        return f"{driver.name} ({driver.popen.pid})" + (f", comes back {shift:+.0f} s off" if shift else "")

    def _freeze_driver(self) -> str | None:
        drivers = self._at.drivers()
        if any(driver.frozen for driver in drivers):
            return None
        driver = self._at.pick(drivers)
        if driver is None:
            return None
        driver.freeze()
        seconds = self._at.rng.uniform(0.3, 2.0) * LEASE
        self._at.later(seconds, driver.thaw)
        return f"{driver.name} for {seconds:.1f} s"

    def _kill_scheduler(self) -> str | None:
        scheduler = self._at.site.scheduler
        if scheduler is None or scheduler.popen.poll() is not None:
            return None
        scheduler.kill()
        seconds = self._at.rng.uniform(0.1, 1.0)
        self._at.later(seconds, self._at.site.start_scheduler)
        return f"away for {seconds:.1f} s"

    def _freeze_scheduler(self) -> str | None:
        scheduler = self._at.site.scheduler
        if scheduler is None or scheduler.frozen or scheduler.popen.poll() is not None:
            return None
        scheduler.freeze()
        seconds = self._at.rng.uniform(0.5, 3.0)
        self._at.later(seconds, scheduler.thaw)
        return f"for {seconds:.1f} s"

    def _run_another_version(self) -> str | None:
        """A driver whose hpstage writes another format joins the plan: it must be refused, and do no harm."""
        task = self._at.site.task("full", round=10**6, seed=1, trials=1)
        stranger = self._at.site.spawn("another", ["tests.faults.another_version", str(task.write())])

        def look() -> None:
            if stranger.popen.poll() is None:
                self._at.later(0.5, look)
            elif stranger.popen.returncode != REFUSED:
                self._at.violations.append(f"a driver of another version was not refused:\n{stranger.tail()}")

        self._at.later(1.0, look)
        return str(stranger.popen.pid)

    ACTS: ClassVar[dict[str, Callable[[Processes], str | None]]] = {
        "worker killed": lambda self: self._signal_worker(signal.SIGKILL),
        "worker terminated": lambda self: self._signal_worker(signal.SIGTERM),
        "worker segfaulted": lambda self: self._signal_worker(signal.SIGSEGV),
        "worker frozen": _freeze_worker,
        "worker's clock wrong": _shift_worker,
        "training process killed": lambda self: self._signal_training_process(signal.SIGKILL),
        "training process aborted": lambda self: self._signal_training_process(signal.SIGABRT),
        "training process frozen": lambda self: self._signal_training_process(signal.SIGSTOP),
        OUT_OF_MEMORY: _exhaust_memory,
        "training process stutters": _stutter,
        "training processes killed twice": _kill_all_training_processes,
        "fork server killed": lambda self: self._signal_fork_server(signal.SIGKILL),
        "fork server frozen": lambda self: self._signal_fork_server(signal.SIGSTOP),
        "driver killed": lambda self: self._kill_driver(0.0),
        "driver interrupted": lambda self: self._signal_driver(signal.SIGINT),
        "driver terminated": lambda self: self._signal_driver(signal.SIGTERM),
        "driver frozen": _freeze_driver,
        "driver's clock wrong": lambda self: self._kill_driver(self._at.rng.choice([-HOUR, HOUR])),
        "another version": _run_another_version,
        "scheduler killed": _kill_scheduler,
        "scheduler frozen": _freeze_scheduler,
    }


def is_training(pid: int) -> bool:
    """Whether a process trains: one that was spawned for that, or forked by a server."""
    words = _words(pid)
    if "forking_process" in words:
        return "forking_process" in _words(_parent(pid))
    return "hpstage.cluster.training_process" in words


def is_server(pid: int) -> bool:
    """Whether a process forks training processes."""
    return "forking_process" in _words(pid) and "forking_process" not in _words(_parent(pid))


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:  # it has ended
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
