"""How long a search takes to begin and to end: from the call to its first training step, and from its last report on.

    .venv/bin/python scripts/bench_start.py [--json FILE] [--rounds 5]

Every figure is of fresh processes, in turns; medians in seconds. A round's ratios are to its own ``import``: what
``python -c "import torch, optuna, distributed"`` takes, which every search imports.

first         a search as anybody starts it, on its own local cluster of two workers, with a new store
second        the second of two searches on a cluster that is kept (``hpstage.local_cluster``), of another study
remembered    a search in a new process on a store in which its workload was trained before

Of each, ``step`` is the time from the call to the first training step, of which ``executor`` is over when Dask is
imported, ``workers`` when they are there, ``shipped`` when they have the trainable and are described, ``tried`` when it
was tried out; ``close`` is the time from the last report to the return, ``exit`` that from there to the end of the
process. ``optimizer`` is what ``torch`` itself takes until it has an optimizer: it imports its compiler for the first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command_line import parser_of, shown, write

BASES = {
    "import": "import torch, optuna, distributed",
    "optimizer": "import torch; torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)",
    "import hpstage": "import hpstage",
}
SEARCHES = ("first", "second", "remembered")
PHASES = ("executor", "workers", "shipped", "tried", "step", "close", "exit")

if __name__ == "__main__" and "--search" not in sys.argv:
    Trainable: Any = object  # the bench itself trains nothing
else:
    import optuna
    import torch

    import hpstage

    Trainable = hpstage.torch.TorchTrainable


class Net(Trainable):  # type: ignore[misc]
    """A small network; each process leaves a file with the time of its first step."""

    def dataset(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(512, 16, generator=generator), torch.randint(0, 2, (512,), generator=generator)
        return torch.utils.data.TensorDataset(x, y)

    def model(self, hp: Any) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def optimizer(self, model: Any, hp: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=hp["lr"], momentum=0.9)

    def loss(self, model: Any, batch: Any) -> Any:
        if not os.path.exists(f"step-{os.getpid()}"):
            with open(f"step-{os.getpid()}", "w") as file:
                file.write(str(time.time()))
        x, y = batch
        return torch.nn.functional.cross_entropy(model(x), y)

    def evaluate(self, model: Any) -> dict[str, float]:
        return {"score": 1.0}


def space(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 0.01, 0.1), "batch_size": 32}


def timed(marks: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        finally:
            marks[name] = time.time()

    return call


def search(executor: Any, store: str, seed: int) -> dict[str, float]:
    """Search, and return the seconds from the call to each phase's end; ``close`` from the last report on."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    marks: dict[str, float] = {}
    for left in Path().glob("step-*"):
        left.unlink()
    began = time.time()
    from hpstage.plan.facts import StateReached
    from hpstage.search import call

    made = call.as_executor

    def as_executor(given: object) -> Any:
        executor: Any = made(given)
        marks["executor"] = time.time()
        phases = {"workers": (executor._place, "open"), "shipped": (executor, "open"), "tried": (executor, "try_out")}
        for name, (owner, method) in phases.items():
            setattr(owner, method, timed(marks, name, getattr(owner, method)))
        return executor

    call.as_executor = as_executor
    result = hpstage.optimize(study, Net(), space, metric="score", steps=50, n_trials=4, executor=executor, store=store)
    returned = time.time()
    call.as_executor = made
    marks["step"] = min(float(file.read_text()) for file in Path().glob("step-*"))
    last = max(fact.at for fact in result.journal if isinstance(fact, StateReached))
    return {name: at - began for name, at in marks.items()} | {"close": returned - last}


def searches(name: str) -> None:
    """Write the figures of a search, as the process of its own."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if name == "second":
        with hpstage.local_cluster(2, gpus=0) as workers:
            search(workers, "store-1", 1)
            found = search(workers, "store-2", 2)
    else:
        found = search(None, "store", SEARCHES.index(name))
    Path("found.json").write_text(json.dumps({**found, "exit": time.time()}))


def seconds_of(*words: str, folder: Path | None = None) -> float:
    """Return the time at which a process has ended, after printing what it says if it fails."""
    # Bytecode is cached, as it is wherever a search is started for the second time.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return time.time()


def once(name: str, folder: Path) -> dict[str, float]:
    folder.mkdir(parents=True, exist_ok=True)
    ended = seconds_of(str(Path(__file__).resolve()), "--search", name, folder=folder)
    found: dict[str, float] = json.loads((folder / "found.json").read_text())
    return {**found, "exit": ended - found["exit"]}


def one_round(folder: Path) -> dict[str, float]:
    found = {}
    for name, code in BASES.items():
        began = time.time()
        found[name] = seconds_of("-c", code) - began
    for name in SEARCHES:
        # The third resumes the first.
        figures = once(name, folder / ("first" if name == "remembered" else name))
        found |= {f"{name} {phase}": figures[phase] for phase in PHASES if phase in figures}
    for name in ("optimizer", *(f"{search} step" for search in SEARCHES)):
        found[f"{name} / import"] = found[name] / found["import"]
    found["first step / optimizer"] = found["first step"] / found["optimizer"]
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--search", choices=SEARCHES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.search:
        searches(options.search)
        return 0
    rounds = []
    with tempfile.TemporaryDirectory(prefix="hpstage-bench-") as name:
        for number in range(options.rounds + 1):
            rounds.append(one_round(Path(name) / str(number)))
    rounds = rounds[1:]  # the first has filled the caches
    table = {name: [found[name] for found in rounds] for name in rounds[0]}
    write(options, shown(table, f"s, {options.rounds} rounds") | {"rounds": options.rounds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
