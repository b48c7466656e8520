"""What the studies on a Dask cluster train. Processes that train import this module, and so it imports little."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpstage.testing.toys import Tape

RUNG = 4


class Steady(Tape):
    """A Tape whose steps take a while, and that counts them in a file per worker.

    Args:
        folder: where each worker writes a byte per step.
        seconds: of a step.
        fate: called once before some step after the first rung, on one of the workers: what happens to it.
    """

    def __init__(self, folder: Path | None, seconds: float = 0.0, fate: Callable[[], object] | None = None) -> None:
        super().__init__()
        self.folder = None if folder is None else str(folder)
        self.seconds = seconds
        self.fate = fate

    def train(self, step: int, hp: Any) -> None:
        if self.folder is not None:
            folder = Path(self.folder)
            if self.fate is not None and step > RUNG and first(folder / "fate"):
                (folder / "victim").write_text(str(worker_of_this()))
                self.fate()
            time.sleep(self.seconds)  # stands for work
            with open(folder / f"steps-{worker_of_this()}", "a") as steps:
                steps.write(".")
        super().train(step, hp)


class Noted(Tape):
    """A Tape whose steps take a while, and that records which workers train, and the steps of each of their processes.

    Args:
        seconds: of a step.
        folder: of a file for each worker, and one for each process, where it writes a byte per step.
    """

    def __init__(self, seconds: float, folder: str) -> None:
        super().__init__()
        self.seconds = seconds
        self.folder = folder

    def setup(self, hp: Any) -> None:
        (Path(self.folder) / f"worker-{worker_of_this()}").touch()
        super().setup(hp)

    def train(self, step: int, hp: Any) -> None:
        time.sleep(self.seconds)  # stands for work
        super().train(step, hp)
        with open(Path(self.folder) / f"steps-{os.getpid()}", "a") as steps:
            steps.write(".")  # counted by the test: what is trained twice is in no journal


class Hanging(Tape):
    """A Tape that leaves a byte in a file for each step that begins; one never ends if ``hang`` exists.

    Steps take as many seconds as the variable ``PAUSE`` says: no attribute, since those count in a workload's identity.

    Args:
        folder: where ``steps`` grows, and where ``hang`` lies if the next step is not to end.
    """

    PAUSE = "HPSTAGE_TEST_PAUSE"
    stateless = (PAUSE,)

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def train(self, step: int, hp: Any) -> None:
        with open(Path(self.folder) / "steps", "a") as steps:
            steps.write(".")
        time.sleep(float(os.environ.get(self.PAUSE, "0")))  # stands for work
        while (Path(self.folder) / "hang").exists():
            time.sleep(0.02)
        super().train(step, hp)


class Staged(Tape):
    """A Tape that waits after its first steps, and where ``a`` is 0 once more, until there is a file.

    Args:
        folder: of these files, ``go`` and ``end``, and of one for each worker that trains.
    """

    FIRST, LAST = 20, 900

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def train(self, step: int, hp: Any) -> None:
        folder = Path(self.folder)
        (folder / f"worker-{worker_of_this()}").touch()
        if step < self.FIRST:
            time.sleep(0.05)  # stands for work: what remains is taken to be worth starting workers for
        else:
            hold(str(folder / "go"))
        if step >= self.LAST and hp["a"] == 0:
            hold(str(folder / "end"))
        super().train(step, hp)


def worker_of_this() -> int:
    """The Dask worker's process for which this one trains; this one itself where that is in the search's own process,
    and where it trains for nobody."""
    if "hpstage.cluster.training_process" not in sys.modules or is_forked():
        return os.getpid()
    return os.getppid()


def is_forked() -> bool:
    """Has this process been forked by the server of a local cluster?"""
    return any("forking_process import main" in word for word in sys.orig_argv)


def first(path: Path) -> bool:
    """Has nobody called this for the path before?"""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


# --- fates ------------------------------------------------------------------------------------------------


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_worker() -> None:
    os.kill(worker_of_this(), signal.SIGKILL)
    signal.pause()


def segfault() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def leave() -> None:
    os._exit(1)


def freeze() -> None:
    """The worker and the process that trains for it, as a host that stands still does."""
    os.kill(os.getppid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)


def hold(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)
