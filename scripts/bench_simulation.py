"""How long simulations take: hpstage plan, preflights of a large search on several fleets, and many simulated workers.

    .venv/bin/python scripts/bench_simulation.py [--json FILE] [--part PART] [--trials 1000] [--workers 1000]
                                                 [--stages 100000]

Nothing is trained. Each part can be run by itself:

command     the whole command ``hpstage plan`` on the demo's space, 48 trials on 4 fleets, in a file without torch, in a
            process of its own: the fastest of three
preflight   ``hpstage.preflight`` of so many trials on 8, 16, 40 and 128 workers: 160 steps of 21.5 s, a state kept each
            minute; and of successive halving, 9 rehearsals on each of 8 and 40 workers, with steps for seconds
workers     a simulated search on so many workers with the driver of every search, until so many stages are trained; no
            two steps of siblings take the same time, so that hardly two reports come together. The same stages on a
            hundredth of the workers show what a stage costs more where many are busy

Seconds are of processor time, which other processes disturb less, but for those of the command. Makespans are divided
by the lower bound of the same work (hpstage/plan/bound.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import optuna

import hpstage
from hpstage import schedule as s
from hpstage.algos import SuccessiveHalving
from hpstage.driver.driver import Driver
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.plan.facts import StateKey, TrialAdded, TrialId
from hpstage.plan.log import open_plan
from hpstage.plan.savings import shortest_makespan
from hpstage.scheduler.scheduler import Scheduler
from hpstage.store import MemoryJournal

DEMO = """
from hpstage import schedule as s

def space(trial):
    drops = [trial.suggest_categorical("first_drop", [10, 30, 60]), trial.suggest_categorical("second_drop", [80, 100])]
    return {
        "lr": s.multistep(trial.suggest_categorical("lr", [0.2, 0.1, 0.05]), milestones=drops, gamma=0.2),
        "momentum": 0.9,
        "batch_size": s.piecewise({0: 64, trial.suggest_categorical("grow_batch_at", [20, 40, 80]): 256}),
    }
"""
"""The space of scripts/demo_digits.py."""


def space(trial: optuna.Trial) -> dict[str, s.Schedule | float]:
    """3 x 2 beginnings, from which rates drop twice, batches grow and the weight decay changes."""
    first = trial.suggest_categorical("first", [40, 60, 80])
    second = trial.suggest_categorical("second", [100, 120, 140])
    rate, factor = (
        trial.suggest_categorical("lr", [0.1, 0.05, 0.02]),
        trial.suggest_categorical("gamma", [0.1, 0.2, 0.5]),
    )
    return {
        "lr": s.multistep(rate, milestones=[first, second], gamma=factor),
        "momentum": trial.suggest_categorical("momentum", [0.9, 0.95]),
        "batch": s.piecewise({0: 64, trial.suggest_categorical("grow_at", [40, 80, 120]): 256}),
        "decay": s.piecewise({0: 1e-4, 100: trial.suggest_categorical("decay", [1e-4, 5e-4])}),
    }


def command(options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "demo_space.py"
        file.write_text(DEMO)
        words = [sys.executable, "-m", "hpstage", "plan", f"{file}:space", "--steps", "120", "--n-trials", "48"]
        took = []
        for _ in range(3):
            began = time.perf_counter()
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
            took.append(time.perf_counter() - began)
    return {"command_s": min(took)}


def preflight(options: argparse.Namespace) -> dict[str, float]:
    began = time.process_time()
    timed = {"step_seconds": 21.5, "evaluate_seconds": 5.0, "save_seconds": 1.0, "load_seconds": 1.0}
    said = hpstage.preflight(space, steps=160, n_trials=options.trials, workers=(8, 16, 40, 128), **timed)
    figures = {"preflight_trials": options.trials, "preflight_s": time.process_time() - began}
    for fleet in said.fleets:
        figures[f"over_bound_{fleet.workers}"] = fleet.makespan.median / fleet.lower_bound.median
    began = time.process_time()
    hpstage.preflight(
        space, steps=160, n_trials=options.trials, workers=(8, 40), algorithm=SuccessiveHalving(min_steps=20)
    )
    return figures | {"halving_s": time.process_time() - began}


def search(workers: int, stages: int) -> tuple[float, int, float]:
    """Seconds, stages trained, and the makespan over the bound of a search on simulated workers."""
    plan = open_plan(journal := MemoryJournal(), StateKey("0" * 32), {})
    executor = SimulatedExecutor(
        workers,
        step_seconds=lambda values: 1.0 + float(values["number"]) % 9973 / 9973,
        evaluate_seconds=0.1,
        save_seconds=0.05,
        load_seconds=0.05,
    )
    driver = Driver(plan, Scheduler(plan, checkpoint_every=10**6), executor, journal)
    began = time.process_time()
    trials = []
    for number in range(stages * 100 // 111):  # a hundred begin alike, and ten of these go on alike
        forks = {0: number // 100, 10: 10**6 + number // 10, 20: 2 * 10**6 + number}
        trials.append(TrialAdded(TrialId(f"study/{number}"), {"number": s.piecewise(forks)}, 30))
    driver.add(trials)
    for trial in trials:
        driver.ask(trial.trial, 30)
    answered = 0
    while answered < len(trials):
        answered += len(driver.wait())
    driver.finish()
    took = time.process_time() - began
    least = shortest_makespan(plan, plan.trials.values(), workers)
    return took, len(executor.trained), executor.clock() / least


def many_workers(options: argparse.Namespace) -> dict[str, float]:
    few, many = max(1, options.workers // 100), options.workers
    on_few, stages_on_few, over_on_few = search(few, options.stages)
    on_many, stages_on_many, over_on_many = search(many, options.stages)
    return {
        f"stages_on_{few}": stages_on_few,
        f"search_on_{few}_s": on_few,
        f"over_bound_on_{few}": over_on_few,
        f"stages_on_{many}": stages_on_many,
        f"search_on_{many}_s": on_many,
        f"over_bound_on_{many}": over_on_many,
        "stage_many_over_few": on_many / stages_on_many / (on_few / stages_on_few),
    }


PARTS = {"command": command, "preflight": preflight, "workers": many_workers}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--stages", type=int, default=100_000)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    figures: dict[str, float] = {}
    for name in options.part or PARTS:
        figures |= (found := PARTS[name](options))
        for figure, value in found.items():
            print(f"{figure:<24} {value:>12,.5g}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
