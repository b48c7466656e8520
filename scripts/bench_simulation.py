"""How long simulations take: hpstage plan, preflights of a large search on several fleets, and many simulated workers.

    .venv/bin/python scripts/bench_simulation.py [--json FILE] [--part PART] [--trials 1000] [--workers 1000]
                                                 [--stages 100000] [--studies 8] [--rounds 4]

Nothing is trained. Each part can be run by itself:

command     the whole command ``hpstage plan`` on the demo's space, 48 trials on 4 fleets, in a process of its own: as
            it stands in the demo, and in a file that does not import torch; the fastest of --rounds each
preflight   ``hpstage.preflight`` of so many trials on 8, 16, 40 and 128 workers: 160 steps of 21.5 s, a state kept each
            minute; and of successive halving, 9 rehearsals on each of 8 and 40 workers, with steps for seconds
workers     a simulated search on so many workers with the driver of every search, until so many stages are trained; no
            two steps of siblings take the same time, so that hardly two reports come together. The same stages on a
            hundredth of the workers show what a stage costs more where many are busy

disruptions a search on 40 workers: undisturbed, with one in ten three times as slow, and with workers that are taken
            away after two hours on average, with two minutes' notice or without; makespans and worker-hours by those
            undisturbed
arrivals    --studies that arrive every half hour on one plan and one cluster of 40 workers, and each with a plan and
            such a cluster of its own: worker-hours, and the mean time from a study's arrival to its end

Seconds are of processor time, which other processes disturb less, but for those of the command. Makespans are divided
by the lower bound of the same work (hpstage/plan/bound.py).
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import optuna
from command_line import parser_of, write

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import merged, shortest_makespan
from hpstage.algos import SuccessiveHalving
from hpstage.driver.driver import Driver
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.execution.simulated_cluster import Disruptions, SimulatedCluster
from hpstage.plan.facts import DriverId, DriverJoined, StateKey, TrialAdded, TrialId
from hpstage.plan.log import fold_all, open_plan
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
        spaces = {"demo_s": f"{Path(__file__).parent / 'demo_digits.py'}:space", "without_torch_s": f"{file}:space"}
        figures = {}
        for name, space in spaces.items():
            words = [sys.executable, "-m", "hpstage", "plan", space, "--steps", "120", "--n-trials", "48"]
            took = []
            for _ in range(options.rounds):  # the first may have to compile
                began = time.perf_counter()
                subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
                took.append(time.perf_counter() - began)
            figures[name] = min(took)
    return figures


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
    for number in range(stages * 100 // 111):  # a hundred have one first segment, and ten of these one second segment
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


COSTS = {"step_seconds": 20.0, "evaluate_seconds": 5.0, "load_seconds": 1.0, "save_seconds": 1.0}


class Study:
    """A search on a cluster that others may use, too, on their own plan or on this one."""

    def __init__(self, name: str, cluster: SimulatedCluster, journal: MemoryJournal, kept: set[StateKey]) -> None:
        self.name = name
        self.executor = SimulatedExecutor(cluster, kept=kept, **COSTS)
        self.plan = open_plan(journal, StateKey("0" * 32), {})
        scheduler = Scheduler(self.plan, driver=DriverId(name), pool=self.executor.pool)
        self.driver = Driver(self.plan, scheduler, self.executor, journal)
        self.driver.log.write([DriverJoined(DriverId(name), self.executor.pool, "a host", 0, 0.0)])
        self.waiting = 0
        self.arrived = self.ended = 0.0

    def begin(self, seed: int, trials: int = 60) -> None:
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
        added = [
            TrialAdded(TrialId(f"{self.name}/{number}"), as_schedules(space(study.ask())), 160)
            for number in range(trials)
        ]
        self.driver.add(added)
        for one in added:
            self.driver.ask(one.trial, one.steps)
        self.waiting, self.arrived = trials, self.executor.clock()
        self.executor.cluster.wake()

    def turn(self) -> None:
        answered = len(self.driver.wait())
        self.waiting -= answered
        if answered and not self.waiting:
            self.ended = self.executor.clock()
            self.driver.finish()
            self.driver.leave()
            self.executor.close()


def as_schedules(values: dict[str, s.Schedule | float]) -> dict[str, s.Schedule]:
    return {name: value if isinstance(value, s.Schedule) else s.constant(value) for name, value in values.items()}


def run(studies: Sequence[Study], every: float) -> None:
    """Let a study arrive every so many seconds, until all have ended."""
    for number, study in enumerate(studies):
        cluster = study.executor.cluster
        cluster.at(every * number - cluster.now, functools.partial(study.begin, number))
    while going := [study for study in studies if not study.ended]:
        for study in going:
            study.turn()


def disruptions(options: argparse.Namespace) -> dict[str, float]:
    spot = {"lifetime_seconds": 7200.0, "replace_seconds": 120.0}
    cases = {
        "calm": None,
        "slow": Disruptions(slow=0.1),
        "noticed": Disruptions(notice_seconds=120.0, **spot),
        "unnoticed": Disruptions(**spot),
    }
    figures: dict[str, float] = {}
    for name, case in cases.items():
        study = Study(name, SimulatedCluster(40, disruptions=case), MemoryJournal(), set())
        study.begin(0, trials=options.trials)
        while study.waiting:
            study.turn()
        figures[f"{name}_makespan_h"] = study.ended / 3600
        figures[f"{name}_used_h"] = study.plan.totals.worker_seconds / 3600
        if name != "calm":
            for figure in ("makespan", "used"):
                figures[f"{name}_{figure}_ratio"] = figures[f"{name}_{figure}_h"] / figures[f"calm_{figure}_h"]
    return figures


def arrivals(options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    for kind in ("shared", "own"):
        cluster, journal, kept = SimulatedCluster(40), MemoryJournal(), set[StateKey]()
        if kind == "shared":
            studies = [Study(f"s{number}", cluster, journal, kept) for number in range(options.studies)]
            plans = [studies[0].plan]
        else:  # each has a cluster for itself
            studies = [
                Study(f"s{number}", SimulatedCluster(40), MemoryJournal(), set()) for number in range(options.studies)
            ]
            plans = [study.plan for study in studies]
        for group in [studies] if kind == "shared" else [[study] for study in studies]:
            run(group, 1800.0)
        if kind == "shared":
            fold_all(journal, plans[0], plans[0].apply)
        steps = sum(plan.totals.steps_trained for plan in plans)
        figures[f"{kind}_steps"] = steps
        figures[f"{kind}_used_h"] = sum(plan.totals.worker_seconds for plan in plans) / 3600
        figures[f"{kind}_mean_h"] = sum(study.ended - study.arrived for study in studies) / len(studies) / 3600
        figures[f"{kind}_trained_over_distinct"] = steps / sum(merged(plan).steps_unique for plan in plans)
    return figures | {"shared_over_own_used": figures["shared_used_h"] / figures["own_used_h"]}


PARTS = {
    "command": command,
    "preflight": preflight,
    "workers": many_workers,
    "disruptions": disruptions,
    "arrivals": arrivals,
}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--stages", type=int, default=100_000)
    parser.add_argument("--studies", type=int, default=8, help="that arrive")
    parser.add_argument("--rounds", type=int, default=4, help="of the command")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    figures: dict[str, float] = {}
    for name in options.part or PARTS:
        figures |= (found := PARTS[name](options))
        for figure, value in found.items():
            print(f"{figure:<24} {value:>12,.5g}", flush=True)
    write(options, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
