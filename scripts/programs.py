"""Programs that benchmarks run and compare: in processes of their own, with their seconds and their memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import uuid
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil

MARK = "HPSTAGE_BENCH_PROGRAM"
_PART = 100  # of the time, one in so many seconds is spent looking at memory at most
HERE = Path(__file__).resolve().parent


class Memory(threading.Thread):
    """Watches the memory of all processes that have inherited a mark."""

    def __init__(self, mark: str) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self.largest = 0
        """The most of one process: of what it shares with others, its share."""
        self._mark = mark
        self._over = threading.Event()
        self._ours: dict[int, bool] = {}

    def run(self) -> None:
        wait = 0.5
        while not self._over.wait(wait):
            began = perf_counter()
            self.most = max(self.most, sum(map(self._bytes_of, psutil.process_iter())))
            # To look takes a core, and holds up whoever is looked at: the longer, the more memory processes share.
            wait = max(0.5, _PART * (perf_counter() - began))

    def _bytes_of(self, process: psutil.Process) -> int:
        try:
            if process.pid not in self._ours:
                self._ours[process.pid] = process.environ().get(MARK) == self._mark
            if not self._ours[process.pid]:
                return 0
            own = int(process.memory_full_info().pss)
            self.largest = max(self.largest, own)
            return own
        except psutil.Error:
            return 0  # it has ended

    def end(self) -> dict[str, int]:
        self._over.set()
        self.join()
        return {"memory": self.most, "largest": self.largest}


def ran(file: str, *options: str) -> dict[str, Any]:
    """Run a program of the folder ``peers``, and return what it has printed with its wall seconds and memory."""
    mark = uuid.uuid4().hex
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    # Bytecode is cached, as that of installed packages is.
    present = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    path = {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}  # for the model of ours
    memory = Memory(mark)
    memory.start()
    began = perf_counter()
    with tempfile.TemporaryDirectory() as folder:  # some of them leave files where they run
        done = subprocess.run(
            [sys.executable, str(HERE / "peers" / file), *options],
            cwd=folder,
            env={**present, **threads, **path, MARK: mark, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
            capture_output=True,
            text=True,
        )
    wall = perf_counter() - began
    if done.returncode != 0:
        sys.exit(f"{file} has failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "wall": wall, **memory.end()}
