"""Every algorithm on one space, as a stage tree and without sharing; closed forms; time per trial as trials grow.

    .venv/bin/python scripts/bench_algorithms.py [--json FILE] [--trials 64] [--many 10000]

Table 1: steps requested and trained, merge rate, and whether the search without sharing, with the same seed, ends with
the same best trial and with the same values of every trial at every step. An asynchronous search decides by what has
come in, so that its two runs may differ; a best trial is compared there too, and may be another.

Table 2: merge rates that can be worked out by hand, as the plan counts them and as they were trained.

Table 3: milliseconds per trial in the four quarters of a search with an in-memory study on simulated workers (nothing
is trained or kept: no file system is measured), all of it and without what the same trials take in plain Optuna.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import numpy as np
import optuna
from command_line import parser_of, write

import hpstage
from hpstage import schedule as s
from hpstage.accounting.savings import merged
from hpstage.algorithm import Algorithm
from hpstage.algos import (
    ASHA,
    FullTraining,
    Hyperband,
    MedianStopping,
    OptunaPruner,
    PopulationBasedTraining,
    SuccessiveHalving,
)
from hpstage.execution.simulated import SimulatedExecutor
from hpstage.store import MemoryJournal

STEPS = 81
GRID = {"lr": [0.4, 0.2, 0.1], "first_drop": [9, 27, 54], "second_drop": [60, 72], "grow_batch_at": [18, 36, 63]}


class Bowl:
    """Noisy gradient descent with momentum on a quadratic of 16 curvatures from 0.01 to 4.

    The noise is a function of the step and falls with the batch size: what pays is a rate that is large at first and
    small in the end, as in deep learning.
    """

    version = "1"
    curvature = np.geomspace(0.01, 4.0, 16)

    def setup(self, hp: dict[str, float]) -> None:
        self.x = np.ones(16)
        self.speed = np.zeros(16)

    def train(self, step: int, hp: dict[str, float]) -> None:
        noise = np.random.Generator(np.random.Philox(key=[7, step])).standard_normal(16)
        gradient = self.curvature * self.x + noise / np.sqrt(hp["batch_size"])
        self.speed = hp["momentum"] * self.speed - hp["lr"] * gradient
        self.x = self.x + self.speed

    def evaluate(self) -> dict[str, float]:
        return {"loss": float(0.5 * self.curvature @ self.x**2)}

    def state_dict(self) -> object:
        return {"x": self.x.tolist(), "speed": self.speed.tolist()}

    def load_state_dict(self, state: Any) -> None:
        self.x, self.speed = np.array(state["x"]), np.array(state["speed"])


class Still:
    """Trains nothing."""

    version = "1"

    def setup(self, hp: dict[str, float]) -> None:
        self.count = 0

    def train(self, step: int, hp: dict[str, float]) -> None:
        self.count += 1

    def evaluate(self) -> dict[str, float]:
        return {"loss": float(self.count)}

    def state_dict(self) -> object:
        return self.count

    def load_state_dict(self, state: Any) -> None:
        self.count = state


def space(trial: optuna.Trial) -> dict[str, object]:
    drops = [trial.suggest_categorical("first_drop", GRID["first_drop"])]
    drops.append(trial.suggest_categorical("second_drop", GRID["second_drop"]))
    grow = trial.suggest_categorical("grow_batch_at", GRID["grow_batch_at"])
    return {
        "lr": s.multistep(trial.suggest_categorical("lr", GRID["lr"]), milestones=drops, gamma=0.2),
        "batch_size": s.piecewise({0: 16, grow: 128}),
        "momentum": 0.8,
    }


def search(trainable: object, space: Any, sampler: Any, **options: Any) -> hpstage.Result:
    """A search in this process; a study in memory, and a plan that nobody else uses."""
    settings: dict[str, Any] = {"metric": "loss", "executor": hpstage.InlineExecutor(), "store": MemoryJournal()}
    return hpstage.optimize(optuna.create_study(sampler=sampler), trainable, space, **settings | options)


# --- 1: every algorithm -----------------------------------------------------------------------------------


def searches(trials: int) -> dict[str, tuple[Algorithm, optuna.samplers.BaseSampler, int]]:
    def random() -> optuna.samplers.BaseSampler:
        return optuna.samplers.RandomSampler(seed=0)

    points = int(np.prod([len(choices) for choices in GRID.values()]))
    return {
        "grid": (FullTraining(), optuna.samplers.GridSampler(GRID, seed=0), points),
        "SHA": (SuccessiveHalving(3, 3), random(), trials),
        "SHA, plain": (SuccessiveHalving(3, 3, tree_aware=False), random(), trials),
        "ASHA": (ASHA(3, 3), random(), trials),
        "Hyperband": (Hyperband(3, 3), random(), trials),
        "Hyperband, async": (Hyperband(3, 3, variant="asynchronous"), random(), trials),
        "BOHB": (Hyperband(3, 3), optuna.samplers.TPESampler(seed=0), trials),
        "median stopping": (MedianStopping(9, 9), random(), trials),
        "median pruner": (OptunaPruner(9, 9), random(), trials),
        "PBT": (PopulationBasedTraining(9), random(), max(2, trials // 4)),
    }


def outcome(result: hpstage.Result) -> list[tuple[object, ...]]:
    return [(t.number, t.params, t.state, t.value, t.intermediate_values) for t in result.study.trials]


def algorithms(trials: int, names: Iterable[str] = ()) -> list[dict[str, Any]]:
    rows = []
    for name in names or searches(trials):
        results = []
        for sharing in (True, False):
            algorithm, sampler, n_trials = searches(trials)[name]
            results.append(
                search(Bowl(), space, sampler, algorithm=algorithm, n_trials=n_trials, steps=STEPS, sharing=sharing)
            )
        ours, alone = results
        best = [(r.best_trial.number, r.best_value, r.best_params) for r in results]
        rows.append(
            {
                "algorithm": name,
                "synchronous": algorithm.synchronous,
                "trials": len(ours.study.trials),
                "steps_asked": ours.savings.steps_asked,
                "steps_unique": ours.savings.steps_unique,
                "steps_trained": ours.savings.steps_trained,
                "steps_trained_unshared": alone.savings.steps_trained,
                "merge_rate": ours.savings.merge_rate,
                "best": ours.best_value,
                "same_best": best[0] == best[1],
                "same_study": outcome(ours) == outcome(alone),
            }
        )
    return rows


# --- 2: closed forms --------------------------------------------------------------------------------------


def decay_branches(horizons: list[int], decay: Fraction) -> dict[str, Any]:
    """Warm-up, stable, decay: every horizon's decay branches off one trunk. p = S / ((1 - f) T + f S)."""

    def branches(trial: optuna.Trial) -> dict[str, object]:
        total = trial.suggest_categorical("total", horizons)
        tail = int(decay * total)
        # The first step of a decay has the full rate still: that step is the trunk's.
        return {"lr": s.wsd(0.1, total, warmup=50, decay=tail + 1)}

    # A trial is as long as its horizon: its targets are requested from the driver, without an algorithm.
    from hpstage.driver.driver import Driver
    from hpstage.plan.facts import StateKey, TrialAdded, TrialId
    from hpstage.plan.log import open_plan
    from hpstage.scheduler.scheduler import Scheduler

    journal = MemoryJournal()
    plan = open_plan(journal, StateKey("0" * 32), {})
    driver = Driver(plan, Scheduler(plan), SimulatedExecutor(2), journal)
    for number, total in enumerate(horizons):
        schedules = branches(optuna.trial.FixedTrial({"total": total}))
        added = TrialAdded(TrialId(f"wsd/{number}"), {n: s.as_schedule(v) for n, v in schedules.items()}, total)  # type: ignore[arg-type]
        driver.add([added])
        driver.ask(added.trial, total)
    answered = 0
    while answered < len(horizons):
        answered += len(driver.wait())
    driver.finish()
    total_sum, longest = sum(horizons), max(horizons)
    return {
        "name": f"WSD, {len(horizons)} horizons to {longest}, f = {decay}",
        "steps_asked": merged(plan).steps_asked,
        "steps_unique": merged(plan).steps_unique,
        "steps_trained": plan.totals.steps_trained,
        "expected_requested": total_sum,
        "expected_unique": (1 - decay) * longest + decay * total_sum,
    }


def grid() -> dict[str, Any]:
    """120 epochs, lr {0.1, 0.05} x first drop {60, 80, 100} x factor {0.1, 0.2} x batch {128, 128 -> 256 at 70}."""
    choices = {"lr": [0.1, 0.05], "drop": [60, 80, 100], "factor": [0.1, 0.2], "late": [128, 256]}

    def drops(trial: optuna.Trial) -> dict[str, object]:
        lr = trial.suggest_categorical("lr", choices["lr"])
        drop = trial.suggest_categorical("drop", choices["drop"])
        factor = trial.suggest_categorical("factor", choices["factor"])
        return {
            "lr": s.multistep(lr, milestones=[int(drop)], gamma=factor),
            "batch": s.piecewise({0: 128, 70: trial.suggest_categorical("late", choices["late"])}),
        }

    result = search(Still(), drops, optuna.samplers.GridSampler(choices, seed=0), n_trials=24, steps=120)
    return {
        "name": "grid of 24 trials of 120 epochs",
        "steps_asked": result.savings.steps_asked,
        "steps_unique": result.savings.steps_unique,
        "steps_trained": result.savings.steps_trained,
        "expected_requested": 2880,
        "expected_unique": 1180,
    }


def closed_forms() -> list[dict[str, Any]]:
    rows = [
        grid(),
        decay_branches([100, 200, 400, 800], Fraction(1, 5)),
        decay_branches([250, 500, 750, 1000, 1250], Fraction(1, 10)),
    ]
    for row in rows:
        expected = row.pop("expected_requested"), row.pop("expected_unique")
        row["merge_rate"] = row["steps_asked"] / row["steps_unique"]
        row["expected_merge_rate"] = float(expected[0] / Fraction(expected[1]))
        row["exact"] = (row["steps_asked"], row["steps_unique"]) == expected
        row["exact"] = row["exact"] and row["steps_trained"] == row["steps_unique"]
    return rows


# --- 3: time per trial ------------------------------------------------------------------------------------


def continuous(trial: optuna.Trial) -> dict[str, object]:
    return {
        "lr": s.multistep(trial.suggest_float("lr", 1e-4, 1.0, log=True), milestones=[5], gamma=0.1),
        "momentum": trial.suggest_float("momentum", 0.5, 0.99),
        "batch_size": trial.suggest_categorical("batch_size", [32, 64, 128]),
    }


def quarters(stamps: list[float]) -> list[float]:
    """Milliseconds per trial in each quarter, from the times at which trials ended."""
    size = (len(stamps) - 1) // 4
    return [(stamps[(i + 1) * size] - stamps[i * size]) / size * 1000 for i in range(4)]


def flatness(trials: int, repeats: int) -> dict[str, Any]:
    runs: dict[str, list[list[float]]] = {"all": [], "optuna": []}
    for seed in range(repeats):
        stamps = [time.perf_counter()]
        search(
            Still(),
            continuous,
            optuna.samplers.RandomSampler(seed=seed),
            n_trials=trials,
            steps=10,
            algorithm=FullTraining(window=16),
            executor=SimulatedExecutor(4, measure=lambda key, step: {"loss": int(key[:8], 16) / 16**8}),
            callbacks=[lambda study, trial, stamps=stamps: stamps.append(time.perf_counter())],
        )
        runs["all"].append(quarters(stamps))
        stamps = [time.perf_counter()]
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
        for _ in range(trials):
            trial = study.ask()
            continuous(trial)
            trial.report(0.0, 10)
            study.tell(trial, 0.0)
            stamps.append(time.perf_counter())
        runs["optuna"].append(quarters(stamps))
    total = [statistics.median(run[i] for run in runs["all"]) for i in range(4)]
    plain = [statistics.median(run[i] for run in runs["optuna"]) for i in range(4)]
    own = [a - b for a, b in zip(total, plain, strict=True)]
    ratios = [
        (ours[3] - theirs[3]) / (ours[0] - theirs[0]) for ours, theirs in zip(runs["all"], runs["optuna"], strict=True)
    ]
    return {
        "trials": trials,
        "repeats": repeats,
        "total_ms": total,
        "optuna_ms": plain,
        "own_ms": own,
        "last_over_first": statistics.median(ratios),
        "last_over_first_range": [min(ratios), max(ratios)],
    }


# --- output -----------------------------------------------------------------------------------------------


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=64, help="trials of each search (default: 64)")
    parser.add_argument("--many", type=int, default=10_000, help="trials of the search that is timed (default: 10000)")
    parser.add_argument("--repeats", type=int, default=3, help="how often it is timed (default: 3)")
    parser.add_argument("--algorithms", nargs="+", choices=searches(1), default=(), help="of table 1 (default: all)")
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    rows = algorithms(options.trials, options.algorithms)
    print(
        f"{'':<18}{'trials':>7}{'requested':>10}{'unique':>8}{'trained':>8}{'unshared':>9}{'merge':>8}"
        f"  same best  same study"
    )
    for row in rows:
        print(
            f"{row['algorithm']:<18}{row['trials']:>7}{row['steps_asked']:>10}{row['steps_unique']:>8}"
            f"{row['steps_trained']:>8}{row['steps_trained_unshared']:>9}{row['merge_rate']:>8.2f}"
            f"  {'yes' if row['same_best'] else 'no':<9}  {'yes' if row['same_study'] else 'no'}"
            f"{'' if row['synchronous'] else '  (asynchronous)'}"
        )
    forms = closed_forms()
    print(f"\n{'':<40}{'requested':>10}{'unique':>8}{'trained':>8}{'merge':>8}{'by hand':>9}")
    for row in forms:
        print(
            f"{row['name']:<40}{row['steps_asked']:>10}{row['steps_unique']:>8}{row['steps_trained']:>8}"
            f"{row['merge_rate']:>8.4f}{row['expected_merge_rate']:>9.4f}  {'exact' if row['exact'] else 'NOT EXACT'}"
        )
    flat = flatness(options.many, options.repeats)
    print(
        f"\nms per trial, {flat['trials']:,} trials, median of {flat['repeats']}:   1st     2nd     3rd     4th quarter"
    )
    for name, key in (("in all", "total_ms"), ("plain Optuna", "optuna_ms"), ("hpstage's own", "own_ms")):
        print(f"{name:<40}" + "".join(f"{value:>8.3f}" for value in flat[key]))
    low, high = flat["last_over_first_range"]
    print(f"hpstage's own, last quarter / first: {flat['last_over_first']:.2f} ({low:.2f} to {high:.2f})")
    write(options, {"algorithms": rows, "closed_forms": forms, "time_per_trial": flat})
    sound = all(row["same_best"] and row["same_study"] for row in rows if row["synchronous"])
    return int(not (sound and all(row["exact"] for row in forms)))


if __name__ == "__main__":
    sys.exit(main())
