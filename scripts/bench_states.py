"""What states cost the thread that trains: saving them while it trains on, and loading those that come next.

    python scripts/bench_states.py [--json FILE] [--folders FOLDER ...] [--megabytes MB ...] [--rounds 9]

Each size is measured in a process with the settings of a training process, one thread for torch, and each figure of a
round is compared with ``torch.save`` or a load of the same state in the same folder in the same round.

save_stall_ratio   seconds for which training stands still per saved state, by those of ``torch.save``; as ``_cpu``, CPU
                   seconds of the thread alone: without waits for the disk, and for a core if there is other load
synced_ratio       the same by those of ``torch.save`` and fsync, after which the state is on the disk, not in memory
copy_ratio         the same by those of one copy of the state into memory that is there, which is the least it can take
first_stall_ratio  as save_stall_ratio, for the first state of a process, whose copy needs new memory
prefetch_hidden    share of the seconds of loading a state that are saved if it was prefetched while the chain before
                   trained; of 50 MB and more
fetched_ratio      seconds of such a load by those of one copy of the state, which puts it into the model
saving_slowdown    seconds of a training step while a state is being written, by those of one otherwise
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from command_line import parser_of, write
from msgspec.structs import replace

from hpstage.checkpoints import FolderCheckpoints, LiveCache
from hpstage.cluster import malloc
from hpstage.execution.bundle import Bundle
from hpstage.execution.control import Control
from hpstage.plan.facts import Kept, StateKey, WorkerId
from hpstage.plan.messages import Boundary, BoundaryReached, Chain, ChainReport
from hpstage.schedule import Scalar
from hpstage.testing.chains import chain, key

WORKER = WorkerId("w")
TENSORS = 60
KEPT_AT = 3


class Store(FolderCheckpoints):
    """Signals when a state has been written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")
        self.written = threading.Event()
        self.loaded = threading.Event()
        self.loaded.set()

    def save(self, of: StateKey, state: object, *, step: int, parent: StateKey | None) -> Kept:
        kept = super().save(of, state, step=step, parent=parent)
        self.written.set()
        return kept

    def load(self, of: StateKey) -> object:
        state = super().load(of)
        self.loaded.set()
        return state


class Trained:
    """A state of so many megabytes. A step multiplies matrices; the last one lasts until the states are written, and
    loaded, that should be by then."""

    def __init__(self, megabytes: float, store: Store) -> None:
        size = max(1, int(megabytes * 1e6 / 4 / TENSORS))
        self.state = {f"layer{number}.weight": torch.rand(size) for number in range(TENSORS)}
        self.matrix = torch.rand(192, 192)
        self.store = store
        self.stalled_at = 0.0
        self.stall_cpu: list[float] = []
        self.step_seconds: dict[bool, list[float]] = {True: [], False: []}

    def setup(self, hp: Mapping[str, Scalar]) -> None:
        return

    def train(self, step: int, hp: Mapping[str, Scalar]) -> None:
        if step == KEPT_AT:
            self.stall_cpu.append(time.thread_time() - self.stalled_at)
        self._step(writing=False)
        while step > KEPT_AT and not (self.store.written.is_set() and self.store.loaded.is_set()):
            self._step(writing=True)

    def _step(self, *, writing: bool) -> None:
        began = time.perf_counter()
        for _ in range(8):
            self.matrix = torch.tanh(self.matrix @ self.matrix)
        self.step_seconds[writing].append(time.perf_counter() - began)

    def evaluate(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        self.stalled_at = time.thread_time()
        return self.state

    def load_state_dict(self, state: object) -> None:
        assert isinstance(state, dict)
        for name, tensor in self.state.items():
            tensor.copy_(state[name])


def planned(number: int) -> Chain:
    """Return a chain that saves one state, under a name of its own, and continues."""
    whole = chain(f"c{number}", KEPT_AT + 2, KEPT_AT)
    middle, end = whole.boundaries
    kept = replace(middle, evaluate=False, key=StateKey(f"{number:032x}"))
    return replace(whole, boundaries=(kept, replace(end, keep=False, evaluate=False)))


def stall(megabytes: float, rounds: int, folder: Path) -> dict[str, object]:
    store = Store(folder)
    trained = Trained(megabytes, store)
    reports: list[ChainReport] = []
    bundle = Bundle(trained, store, LiveCache(), worker=WORKER, on_report=reports.append)
    stalls: list[float] = []
    saves: list[float] = []
    save_cpu: list[float] = []
    synced: list[float] = []
    copies: list[float] = []
    room = {name: torch.zeros_like(tensor) for name, tensor in trained.state.items()}
    for number in range(rounds + 1):
        store.written.clear()
        bundle.start(WORKER, planned(number), Control())
        while bundle:
            report = bundle.run()
            if report is not None:
                reports.append(report)
        reached = [report.reached for report in reports if isinstance(report, BoundaryReached)]
        stalls.append(next(r.save_seconds for r in reached if r.kept is not None))
        reports.clear()
        began = time.perf_counter(), time.thread_time()
        torch.save(trained.state, folder / f"state-{number}.pt")
        saves.append(time.perf_counter() - began[0])
        save_cpu.append(time.thread_time() - began[1])
        with open(folder / f"state-{number}.pt", "rb") as file:
            os.fsync(file.fileno())
        synced.append(time.perf_counter() - began[0])
        (folder / f"state-{number}.pt").unlink()
        copies.append(copied(trained.state, room))
        store.delete(StateKey(f"{number:032x}"))
    cpu = [one / other for one, other in zip(trained.stall_cpu, save_cpu, strict=True)]
    ratios, by_synced, by_copies = (
        [one / other for one, other in zip(stalls, others, strict=True)] for others in (saves, synced, copies)
    )
    saving, idle = trained.step_seconds[True], trained.step_seconds[False]
    return {
        "save_stall_ratio": statistics.median(ratios[1:]),
        "save_stall_spread": [min(ratios[1:]), max(ratios[1:])],
        "save_stall_cpu_ratio": statistics.median(cpu[1:]),
        "save_stall_cpu_spread": [min(cpu[1:]), max(cpu[1:])],
        "synced_ratio": statistics.median(by_synced[1:]),
        "synced_spread": [min(by_synced[1:]), max(by_synced[1:])],
        "copy_ratio": statistics.median(by_copies[1:]),
        "copy_spread": [min(by_copies[1:]), max(by_copies[1:])],
        "first_stall_ratio": ratios[0],
        "stall_ms": 1e3 * statistics.median(stalls[1:]),
        "torch_save_ms": 1e3 * statistics.median(saves[1:]),
        "saving_slowdown": statistics.median(saving) / statistics.median(idle) if saving else None,
    }


def copied(state: Mapping[str, torch.Tensor], room: Mapping[str, torch.Tensor]) -> float:
    """Copy a state into memory that is there, and return the seconds it took."""
    began = time.perf_counter()
    for name, tensor in state.items():
        room[name].copy_(tensor)
    return time.perf_counter() - began


def hidden(megabytes: float, rounds: int, folder: Path) -> dict[str, object]:
    """Load the same states in the same process, prefetched and not, by turns."""
    store = Store(folder)
    trained = Trained(megabytes, store)
    trained.store.written.set()
    for step in (1, 2):
        store.save(key(step), trained.state, step=step, parent=None)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    copies: list[float] = []
    room = {name: torch.zeros_like(tensor) for name, tensor in trained.state.items()}
    for number in range(2 * (rounds + 1)):
        prefetched = number % 2 == 0
        bundle = Bundle(trained, store, LiveCache(), worker=WORKER, on_report=lambda report: None)
        nothing = replace(chain("a", KEPT_AT + 2), boundaries=tuple(without(chain("a", KEPT_AT + 2))))
        bundle.start(WORKER, nothing, Control())
        if prefetched:
            store.loaded.clear()
            bundle.expect([key(2)])
        while bundle:
            bundle.run()
        following = chain("b", KEPT_AT + 2, start=2)
        bundle.start(WORKER, replace(following, boundaries=tuple(without(following))), Control())
        while bundle:
            report = bundle.run()
            if isinstance(report, BoundaryReached):
                assert report.reached.source == ("live" if prefetched else "disk")
                seconds[prefetched].append(report.reached.load_seconds)
        if prefetched:
            copies.append(copied(trained.state, room))
    shares = [1.0 - one / other for one, other in zip(seconds[True], seconds[False], strict=True)][1:]
    return {
        "prefetch_hidden": statistics.median(shares),
        "prefetch_hidden_spread": [min(shares), max(shares)],
        "fetched_ratio": statistics.median(
            one / other for one, other in zip(seconds[True][1:], copies[1:], strict=True)
        ),
        "load_ms": 1e3 * statistics.median(seconds[False][1:]),
        "load_fetched_ms": 1e3 * statistics.median(seconds[True][1:]),
    }


def without(planned: Chain) -> list[Boundary]:
    """The boundaries of a chain, at which nothing is to be done."""
    return [replace(each, keep=False, evaluate=False) for each in planned.boundaries]


def shown(value: object) -> str:
    if isinstance(value, list):
        return " to ".join(map(shown, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def in_process(*arguments: str) -> dict[str, object]:
    """Run this script in a process with the settings of a training process."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    ran = subprocess.run(
        [sys.executable, __file__, *arguments],
        env={**os.environ, **malloc.ENVIRONMENT, **threads},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, object] = json.loads(ran.stdout)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--folders", type=Path, nargs="+", default=[Path(tempfile.gettempdir())], help="where to write")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 10, 50, 140, 500], help="sizes of states")
    parser.add_argument("--rounds", type=int, default=9, help="saves or loads of each size")
    parser.add_argument("--one", choices=["stall", "hidden"], help="measure one size here, and print it")
    given = parser.parse_args()
    if given.one is not None:
        with tempfile.TemporaryDirectory(dir=given.folders[0]) as folder:
            measure = stall if given.one == "stall" else hidden
            print(json.dumps(measure(given.megabytes[0], given.rounds, Path(folder))))
        return
    found: dict[str, object] = {"torch": torch.__version__, "rounds": given.rounds}
    for folder in given.folders:
        for megabytes in given.megabytes:
            where = ["--folders", str(folder), "--megabytes", str(megabytes), "--rounds", str(given.rounds)]
            name = f"{folder}: {megabytes:g} MB"
            measured = in_process("--one", "stall", *where)
            if megabytes >= 50:
                measured |= in_process("--one", "hidden", *where)
            found[name] = measured
            print(name, *(f"{what} {shown(value)}" for what, value in measured.items()), sep="\n    ", flush=True)
    write(given, found)


if __name__ == "__main__":
    main()
