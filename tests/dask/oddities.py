"""Trainables that look around in their process, or end it. It imports this module, which therefore imports little."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpstage.cluster import malloc
from hpstage.schedule import Scalar
from hpstage.testing.toys import Counter
from hpstage.training.trainables import Keyed


class Curious(Counter):
    """Reports as metrics, 1 or 0, what its process finds."""

    def evaluate(self) -> dict[str, float]:
        found = {
            "threads": {os.environ[f"{name}_NUM_THREADS"] for name in ("OMP", "MKL", "OPENBLAS")} == {"1"},
            "memory": malloc.ENVIRONMENT.items() <= os.environ.items(),
            "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8"),
            "here": os.environ.get("HPSTAGE_TEST_HERE") == os.getcwd(),
            "arguments": sys.argv[1:] == ["--width", "3"],
        }
        return {name: float(value) for name, value in found.items()}


class OnGPU(Counter):
    """Says that it trains on the GPU that its worker was given, which shows in its results."""

    stateless = ("TEST_GPU",)  # else the store is refused for what differs in it

    def describe_environment(self) -> dict[str, str]:
        kind = os.environ.get("TEST_GPU", "none")
        return {"device": f"cuda ({kind})", "isa": kind}

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        super().train(step, hp)
        self.total += "T4" in os.environ["TEST_GPU"]

    def evaluate(self) -> dict[str, float]:
        return {"total": self.total, "on_t4": float("T4" in os.environ["TEST_GPU"])}


class Leaving(Counter):
    """Ends its process where the value says so: with an exit status, or by a signal (a negative number)."""

    def train(self, step: int, hp: Any) -> None:
        if hp["x"] > 0:
            os._exit(hp["x"])
        os.kill(os.getpid(), -hp["x"])


class Exiting(Counter):
    """Stands for a library whose import ends the process: any but the one in which it was made (which copies it)."""

    def __init__(self) -> None:
        super().__init__()
        self.made_in = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if os.getpid() != state["made_in"]:
            os._exit(7)
        self.__dict__.update(state)


class Once(Counter):
    """Its process is killed the first time that it is set up on a worker."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.made_in = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        mark = Path(f"{state['path']}-{os.getppid()}")
        if os.getpid() != state["made_in"] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.__dict__.update(state)


class Deadly(Counter):
    """Takes its process along when it is set up."""

    def setup(self, hp: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Measuring(Keyed):
    """Measures when two of its processes do; what they find differs."""

    def __init__(self, place: Path) -> None:
        super().__init__(Counter())
        self.place = place

    def measure_backends(self, initial: Mapping[str, Scalar], steps: float) -> dict[str, float]:
        mine = self.place / str(os.getpid())
        mine.touch()
        while len(present := sorted(self.place.iterdir())) < 2:
            time.sleep(0.01)
        number = present.index(mine)
        return {"eager": 1.0 + number, "eager begins": steps, f"compiled by {number}": 1.0}


class Killed(Counter):
    """Whose processes are killed when they unpack it: on all workers, or on the one that is the first to do so."""

    def __init__(self, mark: Path | None = None, how: int = signal.SIGKILL) -> None:
        super().__init__()
        self.how = int(how)
        self.mark, self.made_in = None if mark is None else str(mark).lstrip(os.sep), os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() == self.made_in:
            return
        if self.mark is not None:
            mark = Path(os.sep) / self.mark
            with suppress(FileExistsError), mark.open("x") as file:
                file.write(str(os.getppid()))
            if mark.read_text() not in ("", str(os.getppid())):
                return
        if self.how == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as before the process ignores it
        os.kill(os.getpid(), self.how)
