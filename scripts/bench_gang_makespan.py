"""What gangs bring a search of 400 trials with a narrow trunk, given what ``bench_elastic.py`` has measured.

    .venv/bin/python scripts/bench_elastic.py --json FILE && .venv/bin/python scripts/bench_gang_makespan.py FILE
    .venv/bin/python scripts/bench_gang_makespan.py --kept 0.9 --nodes 16

Prints the makespan as a multiple of work / workers: of a search that is simulated with steps of 32 s. ``kept`` is the
part of its workers' speed that a gang keeps when it has twice as many: half the speed-up of two processes. It is taken
to be so at each doubling.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from collections.abc import Iterator

import optuna

import hpstage
from hpstage import schedule as s
from hpstage.execution.simulated import SimulatedExecutor

WORKERS = (8, 40, 128)


def space(trial: optuna.Trial) -> dict[str, object]:
    """Few lines at first, hundreds at last: three learning rates and two decays, then milestones, momentum, batches."""
    rate = trial.suggest_categorical("rate", [0.1, 0.05, 0.02])
    first = trial.suggest_categorical("first", [40, 60, 80])
    second = trial.suggest_categorical("second", [100, 110, 120])
    gamma = trial.suggest_categorical("gamma", [0.1, 0.2, 0.5])
    batch = trial.suggest_categorical("batch", [128, 256, 512])
    return {
        "lr": s.multistep(rate, [first, second], gamma),
        "batch": s.piecewise({0: 128, 100: batch}),
        "momentum": s.piecewise({0: 0.7, 80: trial.suggest_categorical("momentum", [0.8, 0.9])}),
        "decay": trial.suggest_categorical("decay", [1e-4, 5e-4]),
    }


class Untrained:
    version = "1"


def makespan(workers: int, kept: float, nodes: int = 16, trials: int = 400) -> float:
    """Return the makespan of so many trials as a multiple of work / workers, if each doubling of a gang keeps this part
    of its workers' speed."""
    executor = SimulatedExecutor(
        workers,
        virtual_nodes=nodes,
        speedup=lambda width: width * kept ** math.log2(width),
        step_seconds=32.0,
        gather_seconds=2.0,
        load_seconds=0.5,
        save_seconds=0.5,
    )
    result = hpstage.optimize(
        optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)),
        Untrained(),
        space,
        metric="value",
        steps=160,
        n_trials=trials,
        executor=executor,
        checkpoint_every=160,
        store=hpstage.store.MemoryJournal(),
    )
    assert result.savings.steps_trained == result.savings.steps_unique
    return executor.clock() * workers / (result.savings.steps_unique * 32.0)


def measured(file: str) -> Iterator[tuple[str, int, float]]:
    """Yield what was measured: a name, the number of virtual nodes, and what is kept."""
    with open(file) as stream:
        figures = json.load(stream)["figures"]
    for model, of_nodes in figures.items():
        for nodes, found in of_nodes.items():
            yield f"{model}, {nodes} nodes", int(nodes), found["speedup"] / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="what bench_elastic.py --json has written")
    parser.add_argument("--kept", type=float, nargs="+", default=[])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--trials", type=int, default=400)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("hpstage").setLevel(logging.ERROR)
    cases = [("given", options.nodes, kept) for kept in options.kept]
    if options.file:
        cases += measured(options.file)
    for name, nodes, kept in cases:
        ratios = "  ".join(
            f"{workers} workers: {makespan(workers, kept, nodes, options.trials):.2f}" for workers in options.workers
        )
        print(f"{name:>20}  keeps {kept:.2f} per doubling  {ratios}", flush=True)


if __name__ == "__main__":
    main()
