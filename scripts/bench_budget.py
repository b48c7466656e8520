"""Bytes on disk of a search under ``checkpoint_budget``, next to what is needed, and to what a preflight foresees.

    .venv/bin/python scripts/bench_budget.py [--megabytes 1 50 110] [--trials 12] [--json FILE]

Searches on two local workers, whose states have so many bytes and nothing in common, under each budget. A step takes
20 ms and more, and a state is kept every 4 steps. A thread lists the folder of checkpoints all the time. All figures
are in states:

budget      what was allowed
needed      the most that were needed at a time, with those that running chains were writing, by the journal
peak        the most that the folder ever had
ratio       of the peak to the budget or to what was needed, whichever is larger
foreseen    the least that a search takes under any budget, as ``hpstage.preflight`` says
retrained   steps trained more than once
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from command_line import parser_of, write

import hpstage
from hpstage import schedule as s
from hpstage.algos import FullTraining, PopulationBasedTraining, SuccessiveHalving
from hpstage.cluster import DaskExecutor
from hpstage.rehearsal.costs import costs_of_plan
from hpstage.rehearsal.rehearse import most_needed

STEPS = 16
ALGORITHMS = {
    "full": FullTraining,
    "halving": lambda: SuccessiveHalving(4, 2),
    "PBT": lambda: PopulationBasedTraining(4),
}


class Heavy:
    """Its state has so many bytes, all of which change with each step."""

    def __init__(self, megabytes: float) -> None:
        self.count = int(megabytes * 125_000)
        self.stateless = ("count",)

    def setup(self, hp: dict[str, Any]) -> None:
        self.x = 0.0
        self.bulk = np.zeros(self.count)

    def train(self, step: int, hp: dict[str, Any]) -> None:
        time.sleep(0.02)
        self.x += hp["lr"]
        self.bulk = np.random.default_rng([step, int(1e6 * self.x)]).random(self.count)

    def evaluate(self) -> dict[str, float]:
        return {"x": self.x}

    def state_dict(self) -> dict[str, Any]:
        return {"x": self.x, "bulk": self.bulk}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.x, self.bulk = state["x"], state["bulk"].copy()


def space(trial: optuna.Trial) -> dict[str, object]:
    late = trial.suggest_float("late", 0.01, 0.1)
    return {"lr": s.piecewise({0: trial.suggest_categorical("lr", [0.1, 0.2]), 6: late})}


@contextmanager
def watched(folder: Path) -> Iterator[list[int]]:
    """Yield a list that holds the most bytes that files in the folder ever took."""
    most, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.002):
            total = 0
            for place, _, files in os.walk(folder):
                for file in files:
                    try:
                        total += os.stat(os.path.join(place, file)).st_size
                    except FileNotFoundError:
                        continue  # removed since it was listed
            most[0] = max(most[0], total)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


@dataclass
class Row:
    """Figures of a search; bytes are in states."""

    megabytes: float
    algorithm: str
    budget: float
    needed: int
    peak: float
    ratio: float
    foreseen: float
    retrained: int


def row(megabytes: float, algorithm: str, trials: int, states: float) -> Row:
    """Search under a budget of so many states."""
    settings = {"steps": STEPS, "n_trials": trials, "algorithm": ALGORITHMS[algorithm](), "checkpoint_every": 4}
    one = int(megabytes * 1e6)
    with tempfile.TemporaryDirectory(prefix="hpstage-") as folder, watched(Path(folder, "checkpoints")) as most:
        result = hpstage.optimize(
            optuna.create_study(study_name="heavy", sampler=optuna.samplers.RandomSampler(seed=1)),
            Heavy(megabytes),
            space,
            metric="x",
            executor=DaskExecutor(n_workers=2),
            store=folder,
            checkpoint_budget=int(states * one),
            audit="off",
            **settings,
        )
        needed = most_needed(result)
        costs = costs_of_plan(result.plan)
    expected = hpstage.preflight(
        space,
        sampler=optuna.samplers.RandomSampler(seed=1),
        workers=[2],
        step_seconds=costs.step_seconds,
        evaluate_seconds=costs.evaluate_seconds,
        load_seconds=costs.load_seconds,
        save_seconds=costs.save_seconds,
        precedent=None,
        **settings,
    )
    peak = most[0] / one
    return Row(
        megabytes=megabytes,
        algorithm=algorithm,
        budget=states,
        needed=needed,
        peak=peak,
        ratio=peak / max(states, needed),
        foreseen=expected.checkpoints_needed.median,
        retrained=result.savings.steps_trained - result.savings.steps_unique,
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1.0, 50.0, 110.0], help="of each state")
    parser.add_argument("--trials", type=int, default=12, help="of each search")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.1, 3.1], help="states")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    names = [field.name for field in fields(Row)]
    print("".join(f"{name:>10}" for name in names))
    rows = []
    for megabytes in arguments.megabytes:
        for algorithm in arguments.algorithms:
            for states in arguments.budgets:
                rows.append(asdict(row(megabytes, algorithm, arguments.trials, states)))
                print(
                    "".join(f"{v:>10.3g}" if isinstance(v, float) else f"{v:>10}" for v in rows[-1].values()),
                    flush=True,
                )
    write(arguments, rows)


if __name__ == "__main__":
    main()
