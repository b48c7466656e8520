"""What planning costs as trials grow: inserting them, deciding on chains, opening a store, and a whole random study.

    .venv/bin/python scripts/bench_planner.py [--part plan insert decide open study] [--sizes 10000 100000]
                                              [--workers 1000] [--turns 5000] [--events 100000 1000000]
                                              [--trials 10000 30000] [--store FOLDER] [--json FILE]

A trial has 3 hyperparameters and 5 segments of 10 steps, in each of which all three have other values. *Shared* trials
are leaves of a full tree (branching at every milestone), in random order; *distinct* ones have nothing in
common. Each row is measured in a process of its own, in seconds of processor time; ratios are of the last row
of a kind to its first. ``squares_ms`` is what the sum of a million squares takes in the same process (the less of
before and after), since machines differ, and so does one from minute to minute.

plan    per_s         trials per second that a plan takes: each is added and requested, as facts
        add_us, ask_us  the same by part, microseconds per trial
        bytes         of memory per trial, all of them waiting for their results: growth of the resident set
        nodes         of the plan, per trial
insert  per_s         trials per second that a driver takes, from schedules to stages that could be trained: written
                      to a journal in memory (encoded and hashed), folded, requested, and put into the stage tree
        add_us, ask_us  the same by part, microseconds per trial
        build_us      what building the schedules takes besides
        bytes         of memory per trial: growth of the resident set without the records, which are ``journal``
decide  one_us        a decision, with --workers busy workers: a boundary or the end of a chain is reported, facts
                      follow, are written and folded, and what the worker does next is chosen, written, folded and
                      sent. Mean of --turns in which one report comes, without what the executor itself takes
        choose_us       of this, the choice alone: what workers do next, where chains yield, and their instructions
        p50_us, p99_us  and the quantiles of these turns
        ten_us        a decision where ten reports come at a time, as when workers report faster than one by one
        choose_ten_us   of this, the choice alone
        first_s       the first turn, in which all workers join and get a chain
open    open_s        opening the SQLite store of a search with so many records (made first, if --store has none):
                      *folded* from its journal, or *restored* from its snapshot
        wall_s        the same by the clock
        read_s, decode_s  folded: of this, reading the records, and decoding them
        encode_s, write_s, snapshot_mb  folded: making a snapshot, writing it, and its size
        bytes         of memory per trial: growth of the resident set
study   ms            per trial of ``hpstage.optimize`` with a random sampler, storage in memory, on 8 simulated workers
        bytes         of memory per trial: growth of the resident set
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from command_line import parser_of, write
from planner_load import BATCH, LENGTH, STEPS, WORKLOAD, choices, insert, new_driver, trials_of

from hpstage import schedule as s
from hpstage.driver.driver import Driver
from hpstage.plan.facts import SearchStarted, TargetAsked, TrialEnded, TrialProposed
from hpstage.plan.log import open_plan, read_facts, split
from hpstage.plan.plan import SearchPlan
from hpstage.plan.uncollected import uncollected
from hpstage.scheduler.scheduler import Scheduler
from hpstage.store.memory import MemoryJournal

KINDS = ("shared", "distinct")


def squares() -> float:
    """Return the milliseconds that the sum of a million squares takes."""
    began = time.process_time()
    sum(number * number for number in range(1_000_000))
    return 1e3 * (time.process_time() - began)


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


# --- the parts, each in a process of its own ------------------------------------------------------------------


def part_plan(kind: str, trials: int, options: argparse.Namespace) -> dict[str, float]:
    plan = SearchPlan(WORKLOAD)
    chosen = list(choices(kind, trials))
    before = resident()
    add = ask = 0.0
    for first in range(0, trials, BATCH):
        added = trials_of(chosen, first)
        targets = [TargetAsked(trial.trial, STEPS) for trial in added]
        with uncollected():  # as where a driver folds many
            began = time.process_time()
            for trial in added:
                plan.apply(trial)
            half = time.process_time()
            for target in targets:
                plan.apply(target)
            add, ask = add + half - began, ask + time.process_time() - half
    del added, targets, trial, target
    grown = resident() - before
    return {
        "per_s": trials / (add + ask),
        "add_us": 1e6 * add / trials,
        "ask_us": 1e6 * ask / trials,
        "bytes": grown / trials,
        "nodes": len(plan.nodes) / trials,
    }


def part_insert(kind: str, trials: int, options: argparse.Namespace) -> dict[str, float]:
    driver, _, _, journal = new_driver(options.workers)
    insert(driver, kind, 100)  # what is imported or compiled at first
    driver, _, _, journal = new_driver(options.workers)
    before = resident()
    seconds = insert(driver, kind, trials)
    grown = resident() - before
    records = sum(map(sys.getsizeof, journal.read())) + trials * 2 * (sys.getsizeof(b"0" * 16) + 16)
    each = {f"{name}_us": 1e6 * spent / trials for name, spent in seconds.items()}
    return {
        "per_s": trials / (seconds["add"] + seconds["ask"]),
        **each,
        "bytes": (grown - records) / trials,
        "journal": records / trials,
    }


def part_decide(kind: str, trials: int, options: argparse.Namespace) -> dict[str, float]:
    driver, scheduler, executor, _ = new_driver(options.workers)
    insert(driver, kind, trials)
    began = time.process_time()
    driver.wait()
    driver.wait()
    first = time.process_time() - began
    for _ in range(options.workers // 2):
        driver.wait()
    turns: list[float] = []

    def decide(reports: int) -> tuple[float, float]:
        """Microseconds of the process per report, of which some come at a time, and of choosing alone."""
        executor.at_a_time, executor.seconds, scheduler.seconds = reports, 0.0, 0.0
        began = time.process_time()
        for _ in range(options.turns // reports):
            at, outside = time.perf_counter(), executor.seconds
            driver.wait()
            turns.append(time.perf_counter() - at - (executor.seconds - outside))
        seconds = time.process_time() - began - executor.seconds
        return 1e6 * seconds / options.turns, 1e6 * scheduler.seconds / options.turns

    one, choice = decide(1)
    turns.sort()
    ten, choice_of_ten = decide(10)
    return {
        "one_us": one,
        "choose_us": choice,
        "p50_us": 1e6 * turns[len(turns) // 2],
        "p99_us": 1e6 * turns[len(turns) * 99 // 100],
        "ten_us": ten,
        "choose_ten_us": choice_of_ten,
        "first_s": first,
    }


def fill(folder: Path, events: int) -> None:
    """Write a store of a search of shared trials in ``folder``, with at least so many records."""
    from hpstage.execution.simulated import SimulatedExecutor
    from hpstage.store import SQLiteJournal

    with contextlib.closing(SQLiteJournal(folder / "plan.sqlite")) as journal:
        plan = open_plan(journal, WORKLOAD, {})
        driver = Driver(plan, Scheduler(plan), SimulatedExecutor(8, evaluate_seconds=0.1, state_bytes=1000), journal)
        driver.log.write(
            [SearchStarted("study", "Full()", ("value",), STEPS, None, "Random", 0.0, directions=("minimize",))]
        )
        first, chosen = 0, list(choices("shared", events // 5 + BATCH))
        facts, seen = 0, 0
        while facts < events:
            batch = list(enumerate(trials_of(chosen, first), first))
            first += BATCH
            driver.add([trial for _, trial in batch], [TrialProposed("study", n, t.trial, {}) for n, t in batch])
            for _, trial in batch:
                driver.ask(trial.trial, STEPS)
            answered = 0
            while answered < len(batch):
                answered += len(driver.wait())
            driver.log.write([TrialEnded("study", t.trial, "COMPLETE", (0.001 * n,), STEPS, 0.0) for n, t in batch])
            facts += sum(len(split(record)) for record in journal.read(seen))
            seen = plan.position
        driver.finish()


def part_open(kind: str, events: int, options: argparse.Namespace) -> dict[str, float]:
    from hpstage.driver.places import open_existing
    from hpstage.plan.snapshot import snapshot_of
    from hpstage.store import SQLiteJournal

    folder = options.store / str(events)
    snapshot = folder / "plan.sqlite-snapshot"
    if not (folder / "plan.sqlite").exists():
        folder.mkdir(parents=True, exist_ok=True)
        fill(folder, events)
    if kind == "folded":
        snapshot.unlink(missing_ok=True)
    with ExitStack() as closing:
        gc.collect()
        before = resident()
        began, clock = time.process_time(), time.perf_counter()
        plan, places = open_existing(folder, None, closing=closing)
        seconds, wall = time.process_time() - began, time.perf_counter() - clock
        grown = resident() - before
        assert plan.restored == (0 if kind == "folded" else plan.position)
        found = {
            "open_s": seconds,
            "wall_s": wall,
            "records": len(places.journal),
            "trials": len(plan.trials),
            "bytes": grown / len(plan.trials),
        }
        if kind == "restored":
            return found
        began = time.process_time()
        content = snapshot_of(plan)
        encoded = time.process_time()
        with contextlib.closing(SQLiteJournal(folder / "plan.sqlite")) as journal:
            journal.write_snapshot(content)
        found |= {
            "encode_s": encoded - began,
            "write_s": time.process_time() - encoded,
            "snapshot_mb": len(content) / 1e6,
        }
        gc.disable()
        began = time.process_time()
        places.journal.read()
        read = time.process_time() - began
        for _ in read_facts(places.journal):
            pass
        return found | {"read_s": read, "decode_s": time.process_time() - began - 2 * read}


def part_study(kind: str, trials: int, options: argparse.Namespace) -> dict[str, float]:
    import optuna

    import hpstage
    from hpstage.execution.simulated import SimulatedExecutor

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def space(trial: optuna.Trial) -> dict[str, s.Schedule | int | float]:
        lr, batch = trial.suggest_float("lr", 1e-4, 1e-1, log=True), trial.suggest_categorical("batch", [32, 64])
        drops = [LENGTH * trial.suggest_int("first", 1, 2), LENGTH * trial.suggest_int("second", 3, 4)]
        return {"lr": s.multistep(lr, milestones=drops, gamma=0.1), "batch_size": batch, "momentum": 0.9}

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    before = resident()
    began = time.process_time()
    hpstage.optimize(
        study,
        object(),
        space,
        metric="value",
        steps=STEPS,
        n_trials=trials,
        executor=SimulatedExecutor(8),
        store=MemoryJournal(),
        show_progress_bar=False,
    )
    seconds = time.process_time() - began
    grown = resident() - before
    return {"ms": 1e3 * seconds / trials, "bytes": grown / trials}


PARTS: dict[str, Callable[[str, int, argparse.Namespace], dict[str, float]]] = {
    "plan": part_plan,
    "insert": part_insert,
    "decide": part_decide,
    "open": part_open,
    "study": part_study,
}


def rows_of(part: str, options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    if part == "open":
        yield from ((kind, size) for size in options.events for kind in ("folded", "restored"))
    elif part == "study":
        yield from (("random", size) for size in options.trials)
    else:
        yield from ((kind, size) for kind in options.kinds for size in options.sizes)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[10_000, 100_000])
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5000)
    parser.add_argument("--events", nargs="+", type=int, default=[100_000, 1_000_000])
    parser.add_argument("--trials", nargs="+", type=int, default=[10_000, 30_000])
    parser.add_argument("--store", type=Path, metavar="FOLDER")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row is not None:
        part, kind, size = options.row
        before = squares()
        figures = PARTS[part](kind, int(size), options)
        print(json.dumps(figures | {"squares_ms": min(before, squares())}))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        options.store = options.store or Path(folder)
        return run(options)


def run(options: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
    for part in options.part:
        for kind, size in rows_of(part, options):
            own = ["--workers", str(options.workers), "--turns", str(options.turns), "--store", str(options.store)]
            command = [sys.executable, __file__, *own, "--row", part, kind, str(size)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            figures = json.loads(done.stdout)
            found.append({"part": part, "kind": kind, "size": size, **figures})
            shown = "  ".join(
                f"{name} {value:,.4g}" if value < 1e4 else f"{name} {value:,.0f}" for name, value in figures.items()
            )
            print(f"{part:<7} {kind:<9} {size:>9,}  {shown}", flush=True)
    for size in options.events if "open" in options.part else ():
        folded, restored = (row["open_s"] for row in found if row["part"] == "open" and row["size"] == size)
        print(f"open    restored  {size:>9,}  folded / restored: {folded / restored:.2f}")
        found.append({"part": "open", "kind": "folded / restored", "size": size, "ratio": folded / restored})
    for part in ("plan", "insert", "decide", "study"):
        for kind in dict.fromkeys(row["kind"] for row in found if row["part"] == part):
            rows = [row for row in found if row["part"] == part and row["kind"] == kind]
            if len(rows) > 1:
                name = {"plan": "per_s", "insert": "per_s", "decide": "one_us", "study": "ms"}[part]
                first, last = (1 / row[name] if name == "per_s" else row[name] for row in (rows[0], rows[-1]))
                print(f"{part:<7} {kind:<9} cost at {rows[-1]['size']:,} / at {rows[0]['size']:,}: {last / first:.2f}")
                found.append({"part": part, "kind": kind, "ratio": last / first})
    write(options, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
