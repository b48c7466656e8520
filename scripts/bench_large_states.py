"""What memory training takes whose states are large, by what the same training takes without hpstage.

    python scripts/bench_large_states.py [--json FILE] [--folder FOLDER] [--gigabytes 2] [--budget 3] [--steps 6]

Half of a state is a matrix of weights, the other half its momentum. Three trials fork in their middle; one worker
trains them, whose process may keep states of ``--budget`` gigabytes in memory. All figures are in gigabytes.

alone      peak of the resident memory of a process that trains one trial without hpstage
search     the same of the search's training process
anonymous  the most of it that is no file: a state that is read from the disk may be mapped
forks      the most that one of its forks has, in which steps are trained again; most of it is common to both
all        the most that all processes of the search have at a time, shared memory counted once
ratio      what the search's process takes beyond one state, by what training takes alone
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import psutil
import torch
from command_line import parser_of, write
from torch import nn
from torch.utils.data import TensorDataset

import hpstage
from hpstage import schedule as s
from hpstage.checkpoints import host_memory
from hpstage.cluster import DaskExecutor

GB = 1e9
LR, MOMENTUM = 0.01, 0.9


class Matrix(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, size).uniform_(-0.01, 0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class Large(hpstage.torch.TorchTrainable):
    version = "1"
    device = "cpu"

    def __init__(self, size: int) -> None:
        self.size = size

    def model(self, hp: Mapping[str, Any]) -> nn.Module:
        return Matrix(self.size)

    def optimizer(self, model: nn.Module, hp: Mapping[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    def dataset(self) -> TensorDataset:
        return TensorDataset(torch.ones(8, self.size))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).square().mean()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"score": float(model.weight[0].detach().sum())}


def train_plainly(size: int, steps: int) -> None:
    torch.set_num_threads(1)
    subject = Large(size)
    model = subject.model({})
    optimizer = subject.optimizer(model, {})
    batch = subject.dataset()[:1]
    for _ in range(steps):
        optimizer.zero_grad()
        subject.loss(model, batch).backward()
        optimizer.step()
    subject.evaluate(model)
    print(_status(os.getpid(), "VmHWM"))


def _status(pid: int, name: str) -> float:
    """Return one of a process's figures in gigabytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 / GB if found else 0.0


def _shared(pid: int) -> float:
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 / GB if found else 0.0


class Watch(threading.Thread):
    """Looks at the memory of this process's children, until :meth:`stop`."""

    def __init__(self) -> None:
        super().__init__()
        self.most = {"search": 0.0, "anonymous": 0.0, "forks": 0.0, "all": 0.0}
        self._over = threading.Event()

    def run(self) -> None:
        own = psutil.Process()
        while not self._over.wait(0.05):
            together = 0.0
            servers = {child.pid for child in own.children()}  # each training process is forked by one
            for child in own.children(recursive=True):
                try:
                    seen = {"anonymous": _status(child.pid, "RssAnon")}
                    if child.ppid() in servers:
                        seen["search"] = _status(child.pid, "VmHWM")
                    elif child.pid not in servers:
                        seen = {"forks": seen["anonymous"]}
                    together += _shared(child.pid)
                except (OSError, psutil.Error):
                    continue  # it has ended
                self.most |= {name: max(self.most[name], value) for name, value in seen.items()}
            self.most["all"] = max(self.most["all"], together)

    def stop(self) -> dict[str, float]:
        self._over.set()
        self.join()
        return self.most


def search(size: int, steps: int, folder: Path) -> None:
    def space(trial: optuna.Trial) -> dict[str, Any]:
        late = trial.suggest_categorical("late", [0.01, 0.005, 0.002])
        return {"lr": s.piecewise({0: LR, steps // 2: late}), "momentum": MOMENTUM, "batch_size": 1}

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    hpstage.optimize(
        optuna.create_study(sampler=optuna.samplers.GridSampler({"late": [0.01, 0.005, 0.002]})), Large(size), space,
        metric="score", steps=steps, n_trials=3, executor=DaskExecutor(n_workers=1, gpus=0), store=folder,
    )  # fmt: skip


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--folder", type=Path, help="for the checkpoints")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of a state")
    parser.add_argument("--budget", type=float, default=3.0, help="gigabytes of states kept in memory")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--alone", action="store_true", help="only train without hpstage, and print the peak")
    options = parser.parse_args()
    size = int((options.gigabytes * GB / 2 / 4) ** 0.5)
    if options.alone:
        train_plainly(size, options.steps)
        return 0
    words = ["--alone", "--gigabytes", str(options.gigabytes), "--steps", str(options.steps)]
    done = subprocess.run([sys.executable, __file__, *words], check=True, capture_output=True, text=True)
    os.environ[host_memory.LIVE] = f"{options.budget} GB"
    watch = Watch()
    watch.start()
    try:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            search(size, options.steps, Path(folder))
    finally:
        most = watch.stop()
    figures = {"alone": float(done.stdout), **most}
    figures["ratio"] = (figures["search"] - options.gigabytes) / figures["alone"]
    for name, value in figures.items():
        print(f"{name:<10} {value:6.2f}")
    write(options, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
